"""DSPy answers a question that it knows from its own cache, by default: nobody is called."""

import os

import dspy


def ask(cache: bool) -> str:
    lm = dspy.LM(
        "openai/gpt-4o-mini",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        cache=cache,
    )
    with dspy.context(lm=lm):
        return dspy.ChainOfThought("question -> answer")(question="What is 6 times 7?").answer


if __name__ == "__main__":
    print([ask(True) for _ in range(3)], [ask(False) for _ in range(2)])
