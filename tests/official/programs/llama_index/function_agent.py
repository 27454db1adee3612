"""A `FunctionAgent` with a tool."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="gpt-5-mini",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


agent = FunctionAgent(name="calculator_agent", tools=[multiply], llm=llm, system_prompt="You multiply.")


async def main() -> None:
    print(await agent.run("What is 6 times 7?"))


if __name__ == "__main__":
    asyncio.run(main())
