"""An agent with a tool."""

import asyncio
import os
from typing import Annotated

from agent_framework.openai import OpenAIChatClient


def get_weather(location: Annotated[str, "A city."]) -> str:
    """The weather of a city."""
    return f"It is sunny in {location}."


async def main() -> None:
    client = OpenAIChatClient(model="gpt-5-mini", api_key=os.environ["OPENAI_API_KEY"])
    agent = client.as_agent(name="weather_agent", instructions="Tell the weather.", tools=[get_weather])
    print(await agent.run("How is the weather in Tokyo?"))


if __name__ == "__main__":
    asyncio.run(main())
