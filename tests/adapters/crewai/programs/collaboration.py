"""Collaborating agents, as CrewAI's documentation has them."""

from crewai import Agent, Crew, Process, Task

researcher = Agent(
    role="Research Specialist",
    goal="Conduct thorough research on any topic",
    backstory="Expert researcher with access to various sources",
    allow_delegation=True,
    verbose=True,
)
writer = Agent(
    role="Content Writer",
    goal="Create engaging content based on research",
    backstory="Skilled writer who transforms research into compelling content",
    allow_delegation=True,
    verbose=True,
)
article_task = Task(
    description="Write a comprehensive article about AI in healthcare.",
    expected_output="A complete, publication-ready article",
    agent=writer,
)
result = Crew(agents=[researcher, writer], tasks=[article_task], process=Process.sequential, verbose=True).kickoff()
