"""Three `create_react_agent`s under a supervisor, as a graph."""

from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command

model = ChatOpenAI(model="gpt-5-mini")
ORDER = ("researcher", "mathematician", "writer")


@tool
def search(query: str) -> str:
    """Search for something."""
    return f"There are 6 results for {query}."


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def count_words(text: str) -> int:
    """Count words."""
    return len(text.split())


def supervisor(state: MessagesState) -> Command[Literal["researcher", "mathematician", "writer", "__end__"]]:
    model.invoke([("system", "Say why somebody has to go on."), *state["messages"]])
    done = [message.name for message in state["messages"] if message.name in ORDER]
    return Command(goto=ORDER[len(done)] if len(done) < len(ORDER) else END)


def worker(name: str, use) -> object:
    react = create_react_agent(model, [use], prompt=f"You are the {name}.", name=name)

    def node(state: MessagesState) -> Command[Literal["supervisor"]]:
        said = react.invoke({"messages": [HumanMessage(state["messages"][-1].content)]})["messages"][-1].content
        return Command(update={"messages": [HumanMessage(said, name=name)]}, goto="supervisor")

    return node


builder = StateGraph(MessagesState)
builder.add_node("supervisor", supervisor)
for who, use in zip(ORDER, (search, multiply, count_words), strict=True):
    builder.add_node(who, worker(who, use))
builder.add_edge(START, "supervisor")
graph = builder.compile()

if __name__ == "__main__":
    print(graph.invoke({"messages": [("user", "How many results are there, times 7?")]})["messages"][-1].content)
