"""An agent with a tool, and an answer in a form."""

from pydantic import BaseModel
from pydantic_ai import Agent

Agent.instrument_all()


class Answer(BaseModel):
    text: str
    number: int


agent = Agent("openai-chat:gpt-5-mini", name="dice_agent", output_type=Answer, system_prompt="Throw the dice.")


@agent.tool_plain
def roll_dice(sides: int) -> str:
    """Roll a die."""
    return str(sides)


if __name__ == "__main__":
    print(agent.run_sync("My guess is 4.").output)
