"""`deepagents`: an agent with a plan, files and a subagent."""

from deepagents import create_deep_agent


def internet_search(query: str) -> str:
    """Search the web."""
    return f"Nothing about {query}."


critic = {"name": "critic", "description": "Criticises a text.", "system_prompt": "You criticise.", "tools": []}
agent = create_deep_agent(
    model="openai:gpt-5-mini",
    tools=[internet_search],
    system_prompt="You are a researcher.",
    subagents=[critic],
    name="deep_researcher",
)

if __name__ == "__main__":
    print(agent.invoke({"messages": [("user", "What is LangGraph?")]})["messages"][-1].content)
