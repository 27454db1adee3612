"""The agent of `rag_openai_agents` with room for a real model: more searches, three paragraphs each, longer replies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, ModelSettings, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI

from lightning_examples.rag_openai_agents.agent import Library, search
from lightning_examples.rag_openai_agents.reward import reward

if TYPE_CHECKING:
    from lightning import LLM, Task

INSTRUCTIONS = (
    "Answer the question from the paragraphs that the search tool finds. Search for one fact at a time: most questions need "
    "two to four facts, each found with the one before. When you have them all, reply with one line: `Answer: ` and the "
    "answer, in as few words as possible."
)
MAX_TURNS = 6
"""MuSiQue's questions have 2 to 4 hops: a search for each, one that failed, and the answer. Search-R1 allows 4 turns."""
MAX_TOKENS = 512
"""For a reply. Search-R1 (arXiv 2503.09516) allows 500."""
PARAGRAPHS = 3
"""For a search: as in Search-R1, and in the paper's example."""


async def agent(task: Task, llm: LLM, library: Library) -> float:
    """Answer one question; the reward is the paper's: 0.9 times the token F1, and 0.1 for the form."""
    researcher = Agent[Library](
        name="researcher",
        instructions=INSTRUCTIONS,
        tools=[search],
        model=OpenAIResponsesModel(
            model=llm.model, openai_client=_client(llm.base_url).with_options(api_key=llm.api_key)
        ),
        model_settings=ModelSettings(max_tokens=MAX_TOKENS),
    )
    try:
        result = await Runner.run(researcher, str(task.input), context=library, max_turns=MAX_TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):  # no answer; a tool that does not exist
        return 0.0
    return reward(str(result.final_output), cast("Sequence[str]", task.expected))


@functools.cache
def _client(base_url: str) -> AsyncOpenAI:
    # A new client builds a connection pool (tens of ms); a new key on the same client costs next to nothing.
    return AsyncOpenAI(base_url=base_url, api_key="set per call")
