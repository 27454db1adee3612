"""`dspy.ReAct` with a tool."""

import os

import dspy


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


if __name__ == "__main__":
    dspy.configure(
        lm=dspy.LM("openai/gpt-4o-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    )
    print(dspy.ReAct("question -> answer", tools=[multiply])(question="What is 6 times 7?").answer)
