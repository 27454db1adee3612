"""The bench of prompt algorithms, which runs the agent and asks the optimiser model for them, and its nouns.

The invariant: an algorithm gets all results through the bench, which stores each result before returning it. So an algorithm
that is started again with the same seed repeats its states and pays for nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from lightning.errors import LightningError, OptimizerError
from lightning.types import Json, Rollout, Task

from lightning_prompts.chat_model import ChatModel, Messages

if TYPE_CHECKING:
    from lightning_resources.nouns import Resource


class BudgetSpentError(Exception):
    """The run may not make as many more rollouts as were asked for. Algorithms catch this and return their best prompt so
    far."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to run the agent with one version of the prompt on some tasks. Trials of one version with the same `key` are
    the same trial, which is run only once. `split` and `step` are those of its rollouts."""

    version: int
    tasks: Sequence[Task]
    key: str
    split: str
    step: int


class Bench(Protocol):
    """The interface through which a prompt algorithm runs rollouts, asks the optimiser model and keeps prompts. Errors of the
    store, the runner and the policy server propagate."""

    @property
    def seed(self) -> int:
        """The seed for every random choice of the algorithm."""

    @property
    def train(self) -> Sequence[Task]:
        """The tasks whose rollouts criticisms are written from."""

    @property
    def val(self) -> Sequence[Task]:
        """Held-out tasks to choose by; never empty."""

    @property
    def start(self) -> Resource:
        """The prompt from which the search starts."""

    async def run(self, trials: Sequence[Trial], *, reserve: int = 0) -> list[list[Rollout]]:
        """Run the trials, and return the finished rollouts of each, in the order of its tasks.

        Raises `BudgetSpentError`, before any rollout is made, if the new rollouts and `reserve` more do not fit into the
        budget. The rollouts for the final measurement are always reserved as well.
        """

    async def ask(self, key: str, messages: Messages) -> str:
        """Return the optimiser model's answer, which is asked only once for each key. Raises `OptimizerError` without an
        answer."""

    async def keep(self, text: str, metadata: Mapping[str, Json]) -> Resource:
        """Store a text as a version of the prompt, and return that version."""

    async def get(self, version: int) -> Resource:
        """Return a stored version of the prompt."""

    async def transcript(self, rollout: Rollout) -> str:
        """Return the model calls and tool runs of a rollout as text; parts that are not recorded are left out."""

    async def recall(self, key: str) -> Json:
        """Return the value that was remembered under a key; None if there is none."""

    async def remember(self, key: str, value: Json) -> None:
        """Keep a small value with the run, under a key."""

    async def report(self, step: int, metrics: Mapping[str, float], line: str) -> None:
        """Log the metrics of a step, and print a line about it."""


@dataclass(frozen=True, slots=True)
class OptimizerModel(ChatModel):
    """The model that criticises and edits prompts."""

    role: ClassVar[str] = "the optimiser model"
    failure: ClassVar[type[LightningError]] = OptimizerError
