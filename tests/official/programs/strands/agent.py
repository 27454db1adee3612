"""An agent with a tool."""

import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def letter_counter(word: str, letter: str) -> int:
    """Count a letter in a word."""
    return word.lower().count(letter.lower()[:1])


model = OpenAIModel(
    client_args={"api_key": os.environ["OPENAI_API_KEY"], "base_url": os.environ["OPENAI_BASE_URL"]},
    model_id="gpt-5-mini",
)
agent = Agent(name="counter", model=model, tools=[letter_counter], callback_handler=None)

if __name__ == "__main__":
    print(agent("How many r are in strawberry?"))
