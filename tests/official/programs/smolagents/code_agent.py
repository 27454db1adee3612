"""A `CodeAgent`, which acts by Python code."""

import os

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel("gpt-5-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent(tools=[], model=model, name="coder", description="Writes code.")

if __name__ == "__main__":
    print(agent.run("What is 6 * 7?"))
