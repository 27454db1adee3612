"""MuSiQue with GRPO: the numbers of the loss; `settings.toml` has the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_examples.paper.musique.agent import PARAGRAPHS, agent
from lightning_examples.paper.musique.prepare import CORPUS
from lightning_examples.paper.recipe import Recipe
from lightning_examples.rag_openai_agents.agent import Library
from lightning_examples.rag_openai_agents.retriever import bm25_of

if TYPE_CHECKING:
    from lightning.runner.protocol import Agent


def over(folder: Path) -> Agent:
    """The agent, with the folder's corpus to search in. The index is made once, and shared by the agents' processes."""
    return partial(agent, library=Library(bm25_of(folder.resolve() / CORPUS), k=PARAGRAPHS))


RECIPE = Recipe(
    agent=over,
    # Published for retrieval: 4 (Agent Lightning's two examples), 5 (Search-R1). F1 makes few ties, so that 4 would do for
    # the mean; 8 halve the variance of the group's baseline, and siblings share their first search's prompt in the cache.
    # A KL penalty is published for MuSiQue by nobody. Search-R1 has 0.001 with k3; if the length of replies runs away, set it
    # so: it costs one more forward pass, by weights that are held on the CPU.
    group_size=8,
)
