"""A writer and a critic by turns, until there were four messages."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    writer = AssistantAgent("writer", model_client=client, system_message="Write.")
    critic = AssistantAgent("critic", model_client=client, system_message="Criticise.")
    team = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(4))
    async for message in team.run_stream(task="Write a poem about autumn."):
        print(message)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
