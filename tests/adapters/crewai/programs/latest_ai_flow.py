"""The quickstart of CrewAI's documentation. The search of the web is made up."""

from typing import Any

from crewai import Agent, Crew, Flow, Process, Task
from crewai.flow import listen, start
from crewai.project import CrewBase, agent, crew, task
from crewai.tools import tool
from pydantic import BaseModel


@tool("Search the internet with Serper")
def search(search_query: str) -> str:
    """Search the internet."""
    return "Agents are everywhere."


@CrewBase
class ResearchCrew:
    """Single-agent research crew used inside the Flow."""

    agents: list[Any]
    tasks: list[Any]

    agents_config = "config/agents.yaml"
    tasks_config = "config/tasks.yaml"

    @agent
    def researcher(self) -> Agent:
        return Agent(config=self.agents_config["researcher"], verbose=True, tools=[search])

    @task
    def research_task(self) -> Task:
        return Task(config=self.tasks_config["research_task"])

    @crew
    def crew(self) -> Crew:
        return Crew(agents=self.agents, tasks=self.tasks, process=Process.sequential, verbose=True)


class ResearchFlowState(BaseModel):
    topic: str = ""
    report: str = ""


class LatestAiFlow(Flow[ResearchFlowState]):
    @start()
    def prepare_topic(self) -> None:
        self.state.topic = "AI Agents"

    @listen(prepare_topic)
    def run_research(self) -> None:
        result = ResearchCrew().crew().kickoff(inputs={"topic": self.state.topic})
        self.state.report = result.raw

    @listen(run_research)
    def summarize(self) -> None:
        print("Report:", self.state.report)


if __name__ == "__main__":
    LatestAiFlow().kickoff()
