"""`langgraph-supervisor`: three agents, between whom a supervisor hands over."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langgraph_supervisor import create_supervisor

model = ChatOpenAI(model="gpt-5-mini")


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def search(query: str) -> str:
    """Search the web."""
    return f"Nothing about {query}."


math = create_react_agent(model, [add], name="math_expert", prompt="You are a math expert.")
research = create_react_agent(model, [search], name="research_expert", prompt="You are a researcher.")
poet = create_react_agent(model, [], name="poet", prompt="You are a poet.")
workflow = create_supervisor([math, research, poet], model=model, prompt="You manage a team.").compile()

if __name__ == "__main__":
    print(workflow.invoke({"messages": [("user", "How many people work there?")]})["messages"][-1].content)
