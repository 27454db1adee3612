"""A question-answering agent as the OpenAI Agents SDK's documentation writes one: instructions, a search tool, `Runner.run`.

Nothing in this file knows that it is being trained: `llm` only says where the model is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from lightning_examples.rag_openai_agents import CORPUS
from lightning_examples.rag_openai_agents.retriever import Retriever, bm25_of
from lightning_examples.rag_openai_agents.reward import reward

if TYPE_CHECKING:
    from lightning import LLM, Task

INSTRUCTIONS = "Search for one fact at a time. Then reply with one line: `Answer: ` and the answer."
MAX_CALLS = 5
MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Library:
    """What the tool searches in, and how many documents it shows for one query."""

    retriever: Retriever
    k: int = 1


SHIPPED = Library(bm25_of(CORPUS))
"""Made on import, so that processes forked after it share it."""


# A strict tool puts a grammar on what vLLM samples; its logprobs then cannot be compared with the trainer's.
@function_tool(strict_mode=False)
async def search(library: RunContextWrapper[Library], query: str) -> str:
    """Look up a person, a company or a place."""
    return look_up(library.context, query)


async def agent(task: Task, llm: LLM, library: Library = SHIPPED) -> float:
    """Answer one question and return the reward; `library` is the shipped corpus unless another is given."""
    client = _client(llm.base_url).with_options(api_key=llm.api_key)
    researcher = Agent[Library](
        name="researcher",
        instructions=INSTRUCTIONS,
        tools=[search],
        model=OpenAIResponsesModel(model=llm.model, openai_client=client),
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
    )
    try:
        result = await Runner.run(researcher, str(task.input), context=library, max_turns=MAX_CALLS)
    except (MaxTurnsExceeded, ModelBehaviorError):  # no answer, or no end of it; a tool that does not exist
        return 0.0
    return reward(str(result.final_output), cast("Sequence[str]", task.expected))


def look_up(library: Library, query: str) -> str:
    """What the tool says."""
    return "\n".join(document.text for document in library.retriever.search(query, library.k)) or "no results"


@functools.cache
def _client(base_url: str) -> AsyncOpenAI:
    # A new client builds a connection pool (tens of ms); a new key on the same client costs next to nothing.
    return AsyncOpenAI(base_url=base_url, api_key="set per call")
