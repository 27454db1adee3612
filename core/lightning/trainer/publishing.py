"""Bringing the engine's weights to the policy server, and proof that it computes with them.

The invariant: when `publish` returns, the policy server samples from exactly the engine's weights, under their version; a
few tokens were compared wherever any are known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from lightning.engines.protocol import Engine, WritesAdapters
from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import hash_weights
from lightning.policy_server.weight_transfer.layout import BACKENDS
from lightning.trainer.probing import Prober
from lightning.trainer.stack import Stack
from lightning.types import StepRecord

logger = logging.getLogger(__name__)

HELD_SECONDS = "held_seconds"
"""The metric of a step that says for how long its update let calls stand still."""


class Publisher:
    """Updates the policy server. Calls in flight are frozen while it loads, new ones wait; no rollout is waited for."""

    def __init__(self, stack: Stack, engine: Engine) -> None:
        self._stack, self._engine = stack, engine
        self.prober = Prober(engine, stack.config)
        self._hashing: asyncio.Task[str] | None = None
        self.held = 0.0
        """Seconds for which the last update let calls stand still; the weights are written before."""

    async def publish(self, version: int) -> dict[str, float]:
        """Serve the engine's weights as `version`; return the probe's gaps (nats) as metrics, none where nothing is compared.

        A server that does not compute with them gets them once more. Raises `PolicyServerError` when it still does not.
        """
        folder = self._stack.weights_folder.path()
        file = folder / f"version-{version:08d}.safetensors"
        await self.digest()  # which reads the file that is deleted below
        await asyncio.to_thread(self._write, file)
        found = await self._bring(file, version)
        self._hashing = asyncio.create_task(asyncio.to_thread(hash_weights, file))  # while agents sample
        for old in folder.glob("version-*.safetensors"):
            if old != file:
                await asyncio.to_thread(old.unlink)
        return found

    async def digest(self) -> str:
        """SHA-256 (hex) of the tensors' bytes that were handed over last, in the order of their file (`hash_weights`), be they
        all weights or adapters alone; empty before the first update, while the policy server has the model folder's own."""
        return await self._hashing if self._hashing else ""

    def _write(self, file: Path) -> None:
        """Adapters alone where our own vLLM reads them: it has the model's folder, too, and merges them as the engine would."""
        server, engine = self._stack.config.policy_server, self._engine
        reads_here = not server.attach and server.weight_transfer not in BACKENDS
        if not (reads_here and isinstance(engine, WritesAdapters) and engine.adapters(file)):
            engine.weights(file)

    async def relabel(self, version: int) -> None:
        """Call the weights that are served `version`: the step that led to it has left them as they were."""
        began = time.monotonic()
        await self._stack.update(None, version, None)
        self.held = time.monotonic() - began

    async def recall(self, record: StepRecord) -> None:
        """Probe with tokens of one trained call of a committed step."""
        for attempt in record.rollouts[:1]:
            for call in (await self._stack.store.transitions_of([attempt]))[0][:1]:
                self.prober.recall(call.prompt_ids, call.response_ids)

    async def _bring(self, file: Path, version: int) -> dict[str, float]:
        """Have the policy server take the weights, and see whether it computes with them."""
        for attempt in range(2):
            probe = await asyncio.to_thread(self.prober.probe, attempt)
            began = time.monotonic()
            update = await self._stack.update(file, version, probe)
            self.held = time.monotonic() - began
            if probe is None or not update.served:
                return {}
            verdict = self.prober.judge(probe, update.served, attempt)
            if not verdict.problem:
                return {"probe_gap": verdict.largest, "probe_gap_mean": verdict.mean}
            told = f"after the update to version {version} the policy server's logprobs differ from the trainer's by "
            told += verdict.problem
            if not attempt:
                logger.warning("%s: it is given the weights once more", told)
        raise PolicyServerError(
            f"{told}, also at a second try: it does not serve the trained weights. Nothing is lost; resume the run. If it "
            "comes again, compare dtypes (policy_server.dtype, engine.dtype); trainer.max_logprob_gap sets a bound of your own"
        )
