"""The policies of a loop of your own by name (`Session.policies`): what each was trained to, its rate, its model.

The invariant: a run with one policy has one here too, called `policy`, so that the same loop works for one and for several.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning.batch import FloatArray, Sample
from lightning.engines.protocol import StepResult, TrainsPolicies
from lightning.errors import DataError
from lightning.plugins import plugins
from lightning.trainer.loop import Loop
from lightning.types import POLICY

SHOWN = ("loss", "grad_norm", "tokens", "entropy", "clip_fraction", "lr", "updates", "skipped_nonfinite")
"""The metrics of an engine's step that are those of the one policy of a run."""


Computing = Callable[[], AbstractAsyncContextManager[None]]
"""What holds the engine for the length of a block."""


class SessionPolicy:
    """One policy of a session. `agents` are the globs of the calls that it answers, as in `train_agents`; `trained` is False
    for a policy that stays the model that it begins as. `metrics` are those of its part in the last committed step, such as
    `loss`, `grad_norm`, `gradient_share` (of the squared norm of all policies' gradients) and `tokens`; empty if the step did
    not train it."""

    def __init__(self, name: str, agents: Sequence[str], loop: Loop, computing: Computing, *, trained: bool) -> None:
        self.name, self.agents, self.trained = name, tuple(agents), trained
        self.metrics: Mapping[str, float] = {}
        self.fixed: float | None = None
        """The learning rate that was set; None follows the schedule."""
        self._loop, self._computing = loop, computing

    @property
    def lr(self) -> float | None:
        """The learning rate of the next update: the scheduled rate, or the rate that was set. None for a policy that is not
        trained."""
        if not self.trained:
            return None
        if self.fixed is not None:
            return self.fixed
        rate, engine = self._loop.rate(self._loop.done + 1), self._loop.engine
        return engine.rate_of(self.name, rate) if isinstance(engine, TrainsPolicies) else rate

    @lr.setter
    def lr(self, rate: float | None) -> None:
        """Set the rate of all further updates of this loop, also after a resume, and of those that name a rate for all policies
        (`optim_step(lr=...)`); None follows the schedule again. Raises `DataError` for a rate that is none."""
        self._check_trained("has no learning rate")
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise DataError(f"lr = {rate} of the policy {self.name}: give a number above 0, or None for the schedule's")
        self.fixed, engine = rate, self._loop.engine
        if isinstance(engine, TrainsPolicies):
            if rate is None:
                engine.rates.pop(self.name, None)
            else:
                engine.rates[self.name] = rate

    async def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the logprobs of rows under this policy's present weights, whichever policy sampled them: shape (T,) each, in
        nats; index 0 is NaN. Raises `DataError` for a policy that is not trained."""
        self._check_trained("has no weights in the engine")
        rows = [replace(row, policy=self.name) for row in samples]
        async with self._computing():
            return await asyncio.to_thread(self._loop.engine.logprobs, rows)

    async def export(self, folder: Path | str) -> Path:
        """Write the policy's present model, with adapters merged, as a folder that `transformers` and vLLM load, and return it.
        Raises `DataError` for a policy that is not trained."""
        self._check_trained("has no model of its own")
        engine = self._loop.engine
        write = partial(engine.export_policy, self.name) if isinstance(engine, TrainsPolicies) else engine.export
        async with self._computing():
            return await asyncio.to_thread(write, Path(folder))

    def _check_trained(self, why: str) -> None:
        if not self.trained:
            raise DataError(f"the policy {self.name} is not trained, so it {why}")

    def took(self, result: StepResult) -> None:
        """Note the engine's result of a committed step."""
        before = f"policy/{self.name}/"
        found = {key.removeprefix(before): value for key, value in result.metrics.items() if key.startswith(before)}
        if self.name == POLICY:
            found = {key: result.metrics[key] for key in SHOWN if key in result.metrics}
            found |= {"gradient_share": 1.0} if found.get("grad_norm") else {}
        self.metrics = found


def policies_of(loop: Loop, computing: Computing) -> dict[str, SessionPolicy]:
    """Return the policies of a run by name, in the order of its settings."""
    several = plugins().policy_set(loop.stack.config)
    if several is None:
        return {POLICY: SessionPolicy(POLICY, loop.train_agents, loop, computing, trained=True)}
    return {
        name: SessionPolicy(name, globs, loop, computing, trained=name in several.adapters)
        for name, globs in several.globs.items()
    }


def others(known: Mapping[str, SessionPolicy], named: Sequence[str]) -> list[str]:
    """Return the trained policies that are not `named`. Raises `DataError` for names that are not those of trained policies."""
    trained = [name for name, policy in known.items() if policy.trained]
    if isinstance(named, str) or not named or (wrong := [name for name in named if name not in trained]):
        told = named if isinstance(named, str) or not named else wrong[0]
        raise DataError(f"policies: give a list of trained policies ({', '.join(trained)}), and not {told!r}")
    return [name for name in trained if name not in named]
