"""A planner, workers that the graph sends sections to in parallel, and one who puts them together."""

import operator
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

model = ChatOpenAI(model="gpt-5-mini")


class Sections(BaseModel):
    names: list[str] = Field(min_length=3)


class State(TypedDict):
    topic: str
    sections: list[str]
    done: Annotated[list[str], operator.add]
    report: str


def plan(state: State):
    return {"sections": model.with_structured_output(Sections).invoke(f"Plan a report on {state['topic']}.").names}


def write(state: dict):
    return {"done": [model.invoke(f"Write the section {state['section']}.").content]}


def join(state: State):
    return {"report": model.invoke("Join:\n" + "\n".join(state["done"])).content}


builder = StateGraph(State)
builder.add_node("planner", plan)
builder.add_node("section_writer", write)
builder.add_node("joiner", join)
builder.add_edge(START, "planner")
builder.add_conditional_edges(
    "planner", lambda state: [Send("section_writer", {"section": one}) for one in state["sections"]], ["section_writer"]
)
builder.add_edge("section_writer", "joiner")
builder.add_edge("joiner", END)
graph = builder.compile()

if __name__ == "__main__":
    print(graph.invoke({"topic": "tides"})["report"])
