"""Bringing the engine's weights to the policy server, and proof that it computes with them.

The invariant: when `publish` returns, the policy server samples from exactly the engine's weights, under their version; a
few tokens were compared wherever any are known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from lightning.algorithms.protocol import Batch
from lightning.batch.sample import Sample
from lightning.engines.protocol import Engine
from lightning.errors import PolicyServerError
from lightning.policy_server.protocol import Probe, Update
from lightning.trainer.stack import Stack
from lightning.types import StepRecord

PROBE_TOKENS = 96
"""How many tokens of one trained row the policy server must reproduce after each update."""

HELD = "held_seconds"
"""The metric of a step that says for how long its update let calls stand still."""


class Publisher:
    """Updates the policy server. Calls in flight are frozen while it loads, new ones wait; no rollout is waited for."""

    def __init__(self, stack: Stack, engine: Engine) -> None:
        self._stack, self._engine = stack, engine
        self._probe_ids: Sequence[int] = ()
        self.held = 0.0
        """Seconds for which the last update let calls stand still; the weights are written before."""

    async def publish(self, version: int) -> float | None:
        """Serve the engine's weights as `version`; return the probe's gap (nats), None when nothing could be compared.

        Raises `PolicyServerError` when the server does not compute with the trainer's weights.
        """
        folder = self._stack.folder / "weights"
        folder.mkdir(exist_ok=True)
        file = folder / f"version-{version:08d}.safetensors"
        await asyncio.to_thread(self._engine.weights, file)
        probe = await asyncio.to_thread(self._probe) if self._probe_ids else None
        began = time.monotonic()
        update = await self._stack.update(file, version, probe)
        self.held = time.monotonic() - began
        self._check(update)
        for old in folder.glob("version-*.safetensors"):
            if old != file:
                old.unlink()
        return update.probe_gap

    def remember(self, batch: Batch) -> None:
        """Probe with tokens of this batch from now on, if it has any."""
        if batch.samples:
            self._probe_ids = batch.samples[0].ids[:PROBE_TOKENS].tolist()

    async def recall(self, record: StepRecord) -> None:
        """Probe with tokens of one trained call of a committed step."""
        for attempt in record.rollouts[:1]:
            for call in (await self._stack.store.transitions_of([attempt]))[0][:1]:
                self._probe_ids = [*call.prompt_ids, *call.response_ids][:PROBE_TOKENS]

    def _check(self, update: Update) -> None:
        limit = self._stack.config.trainer.max_logprob_gap
        if update.probe_gap is not None and not update.probe_gap <= limit:
            raise PolicyServerError(
                f"after the update to version {update.version} the policy server's logprobs differ from the trainer's by "
                f"{update.probe_gap:.3g} nats (trainer.max_logprob_gap is {limit:g}): it does not serve the trained weights. "
                "Nothing is lost; resume the run. If it comes again, compare dtypes (policy_server.dtype, engine.dtype)"
            )

    def _probe(self) -> Probe:
        """A few tokens with the trainer's own logprobs."""
        ids = np.asarray(self._probe_ids, dtype=np.int32)
        zeros = np.zeros(len(ids), dtype=np.float32)
        sample = Sample(ids, zeros, zeros, zeros, np.full(len(ids), -1, dtype=np.int32), ())
        return Probe(ids.tolist(), self._engine.logprobs([sample])[0].tolist())
