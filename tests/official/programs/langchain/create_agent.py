"""`create_agent` with two tools, one of which fails, and an answer in a form."""

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: float


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is 20 degrees in {city}."


@tool
def get_humidity(city: str) -> str:
    """The humidity of a city."""
    raise ValueError("the station does not answer")


@wrap_tool_call
def say_errors(request, handler):
    try:
        return handler(request)
    except ValueError as error:
        return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")


agent = create_agent(
    "openai:gpt-5-mini",
    tools=[get_weather, get_humidity],
    middleware=[say_errors],
    response_format=Weather,
    name="weather_agent",
)

if __name__ == "__main__":
    print(agent.invoke({"messages": [("user", "How is the weather in Tokyo?")]})["structured_response"])
