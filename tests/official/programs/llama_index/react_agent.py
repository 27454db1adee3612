"""A `ReActAgent`, whose model answers in text."""

import asyncio
import os

from llama_index.core.agent.workflow import ReActAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="gpt-5-mini",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
)


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main() -> None:
    print(await ReActAgent(name="react_agent", tools=[add], llm=llm).run("What is 40 + 2?"))


if __name__ == "__main__":
    asyncio.run(main())
