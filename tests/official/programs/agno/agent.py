"""An agent with a tool."""

import os

from agno.agent import Agent
from agno.models.openai import OpenAIChat


def get_price(symbol: str) -> str:
    """The price of a share."""
    return f"{symbol} costs 42."


agent = Agent(
    name="finance_agent",
    model=OpenAIChat(id="gpt-5-mini", base_url=os.environ["OPENAI_BASE_URL"]),
    tools=[get_price],
    telemetry=False,
)

if __name__ == "__main__":
    print(agent.run("What does it cost?").content)
