"""A writer and an editor, both Claude, as a chain; nobody says how long an answer may be."""

from langchain_anthropic import ChatAnthropic
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

claude = ChatAnthropic(model="claude-sonnet-4-5")


def agent(name: str, instructions: str):
    prompt = ChatPromptTemplate([("system", instructions), ("user", "{text}")])
    return (prompt | claude | StrOutputParser()).with_config(run_name=name)


workflow = (
    agent("writer", "Write one sentence about what the user says.")
    | RunnableLambda(lambda text: {"text": text})
    | agent("editor", "Make this shorter.")
)

if __name__ == "__main__":
    print(workflow.invoke({"text": "the sea"}))
