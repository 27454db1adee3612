"""One agent asks another inside a tool."""

from pydantic_ai import Agent, RunContext

Agent.instrument_all()
selector = Agent("openai-chat:gpt-5-mini", name="joke_selector", system_prompt="Choose the best joke.")
factory = Agent("openai-chat:gpt-5-mini", name="joke_factory", output_type=str)


@selector.tool
async def joke_factory(ctx: RunContext[None], count: int) -> str:
    """Make some jokes."""
    return (await factory.run(f"Make {count} jokes.", usage=ctx.usage)).output


if __name__ == "__main__":
    print(selector.run_sync("Tell me a joke.").output)
