"""A researcher and a writer, one after another."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool


@tool("look_up")
def look_up(topic: str) -> str:
    """Look something up."""
    return f"{topic} is large."


llm = LLM(model="openai/gpt-4o-mini", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
researcher = Agent(role="Researcher", goal="Find facts", backstory="Careful.", tools=[look_up], llm=llm)
writer = Agent(role="Writer", goal="Write", backstory="Brief.", llm=llm)
research = Task(description="Research the sea.", expected_output="Facts.", agent=researcher)
write = Task(description="Write a sentence about it.", expected_output="A sentence.", agent=writer)

if __name__ == "__main__":
    print(Crew(agents=[researcher, writer], tasks=[research, write], process=Process.sequential).kickoff())
