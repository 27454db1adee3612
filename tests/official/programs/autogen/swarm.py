"""A swarm: one who plans hands over to one who looks for flights."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient


def find_flight(city: str) -> str:
    """Find a flight."""
    return f"There is a flight to {city} at noon."


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o", parallel_tool_calls=False)
    planner = AssistantAgent("planner", model_client=client, handoffs=["flights"], system_message="Hand over.")
    flights = AssistantAgent("flights", model_client=client, tools=[find_flight], system_message="Look for flights.")
    ends = TextMentionTermination("noon") | MaxMessageTermination(12)
    print((await Swarm([planner, flights], termination_condition=ends).run(task="To Tokyo!")).stop_reason)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
