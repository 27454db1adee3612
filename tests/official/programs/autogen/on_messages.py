"""An `AssistantAgent` that is called by hand, plainly and streaming, and answers with a tool's help."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def web_search(query: str) -> str:
    """Find something on the web."""
    return "AutoGen is a framework."


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    agent = AssistantAgent(
        "assistant", model_client=client, tools=[web_search], system_message="Use tools.", reflect_on_tool_use=True
    )
    question = [TextMessage(content="What is AutoGen?", source="user")]
    print((await agent.on_messages(question, CancellationToken())).chat_message)
    await agent.on_reset(CancellationToken())
    async for message in agent.on_messages_stream(question, CancellationToken()):
        print(message)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
