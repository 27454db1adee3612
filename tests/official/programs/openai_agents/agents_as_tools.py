"""An orchestrator whose tools are translators, and somebody who puts their work together."""

import asyncio

from agents import Agent, ItemHelpers, Runner

spanish = Agent("spanish_agent", instructions="Translate to Spanish.", handoff_description="English to Spanish")
french = Agent("french_agent", instructions="Translate to French.", handoff_description="English to French")
orchestrator = Agent(
    "orchestrator",
    instructions="Use the tools to translate.",
    tools=[
        spanish.as_tool("translate_to_spanish", "Translate to Spanish."),
        french.as_tool("translate_to_french", "Translate to French."),
    ],
)
synthesizer = Agent("synthesizer", instructions="Put the translations together.")


async def main() -> None:
    first = await Runner.run(orchestrator, "Say hello.")
    texts = [ItemHelpers.text_message_output(item) for item in first.new_items if item.type == "message_output_item"]
    print((await Runner.run(synthesizer, "\n".join(texts))).final_output)


if __name__ == "__main__":
    asyncio.run(main())
