"""What tunes prompts: an algorithm that never sees weights, and the bench that runs the agent for it.

The invariant: everything an algorithm learns from the world comes through the bench and is kept there before it is told, so
that an algorithm which is started again with the same seed goes through the same states and pays for nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from lightning.algorithms.chat_model import ChatModel, Messages
from lightning.errors import LightningError, OptimizerError
from lightning.types import Json, Rollout, Task

if TYPE_CHECKING:
    from lightning_resources.nouns import Resource


class BudgetSpentError(Exception):
    """The rollouts asked for are more than the run may still make. Algorithms catch it and end with what they have."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The agent with one version of the prompt on some tasks. `key` tells trials of one version apart: the same trial is
    run once, however often it is asked for. `split` and `step` are those of its rollouts."""

    version: int
    tasks: Sequence[Task]
    key: str
    split: str
    step: int


class Bench(Protocol):
    """What an algorithm works with. Errors of the store, the runner and the policy server propagate."""

    @property
    def seed(self) -> int:
        """Seeds every choice of the algorithm."""

    @property
    def train(self) -> Sequence[Task]:
        """Tasks to learn from."""

    @property
    def val(self) -> Sequence[Task]:
        """Held-out tasks to choose by; never empty."""

    @property
    def start(self) -> Resource:
        """The prompt that the component has now."""

    async def run(self, trials: Sequence[Trial], *, reserve: int = 0) -> list[list[Rollout]]:
        """The finished rollouts of each trial, in the order of its tasks.

        Raises `BudgetSpentError`, before any is made, when that many and `reserve` more do not fit into the budget. What the
        last measurement needs is kept aside in any case.
        """

    async def ask(self, key: str, messages: Messages) -> str:
        """The optimiser model's answer; asked once for each key. Raises `OptimizerError` when there is none."""

    async def keep(self, text: str, metadata: Mapping[str, Json]) -> Resource:
        """The text as a version of the prompt."""

    async def get(self, version: int) -> Resource:
        """A version of the prompt."""

    async def transcript(self, rollout: Rollout) -> str:
        """What was said and done in a rollout, as text; what a rollout does not tell is left out."""

    async def recall(self, key: str) -> Json:
        """What was remembered under a key, or None."""

    async def remember(self, key: str, value: Json) -> None:
        """Keep a small value with the run."""

    async def report(self, step: int, metrics: Mapping[str, float], line: str) -> None:
        """Tell whoever watches how it goes."""


@dataclass(frozen=True, slots=True)
class OptimizerModel(ChatModel):
    """The model that criticises and edits prompts."""

    role: ClassVar[str] = "the optimiser model"
    failure: ClassVar[type[LightningError]] = OptimizerError
