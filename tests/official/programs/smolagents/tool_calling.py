"""A `ToolCallingAgent` with a tool."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"It is sunny in {city}."


model = OpenAIServerModel("gpt-5-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[get_weather], model=model, name="weather_agent", description="Knows the weather.")

if __name__ == "__main__":
    print(agent.run("How is the weather in Tokyo?"))
