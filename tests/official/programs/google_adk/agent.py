"""An agent with a tool, on a model that is not Google's."""

import asyncio
import os

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def get_time(city: str) -> dict:
    """The time in a city."""
    return {"time": f"It is noon in {city}."}


model = LiteLlm("openai/gpt-4o-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
root_agent = Agent(name="time_agent", model=model, instruction="Tell the time.", tools=[get_time])


async def main() -> None:
    runner = InMemoryRunner(root_agent, app_name="times")
    session = await runner.session_service.create_session(app_name="times", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text="What time is it in Tokyo?")])
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message):
        print(event.content)


if __name__ == "__main__":
    asyncio.run(main())
