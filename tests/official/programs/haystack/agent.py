"""An agent with a tool."""

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def search(query: Annotated[str, "What to look for."]) -> str:
    """Search the web."""
    return f"Nothing about {query}."


if __name__ == "__main__":
    agent = Agent(chat_generator=OpenAIChatGenerator(model="gpt-5-mini"), tools=[search])
    print(agent.run(messages=[ChatMessage.from_user("What is Haystack?")])["last_message"].text)
