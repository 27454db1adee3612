"""Which algorithm trains which step: one for all of them, or several in turn (`sft:2,grpo:20`).

The invariant: the algorithm of a step follows from its number alone, so that a resumed run and an audit find the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.algorithms.protocol import Algorithm, needs_critic


@dataclass(frozen=True, slots=True)
class AlgorithmSchedule:
    """Algorithms with the step that each begins with, in order, the first with step 0. `steps` is how many all of them take;
    None where the last one goes on to `trainer.steps`."""

    phases: tuple[tuple[int, Algorithm], ...]
    steps: int | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> AlgorithmSchedule:
        """One algorithm for all steps."""
        return cls(((0, algorithm),))

    def at(self, step: int) -> Algorithm:
        """The algorithm of a step."""
        return [algorithm for first, algorithm in self.phases if first <= step][-1]

    @property
    def needs_critic(self) -> bool:
        """Whether one of them uses a critic: the engine has it from the beginning then."""
        return any(needs_critic(algorithm) for _, algorithm in self.phases)
