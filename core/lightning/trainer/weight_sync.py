"""Brings the engine's weights to the policy server, and proves that the server computes with them.

The invariant: when `publish` returns, the policy server samples from exactly the engine's weights, under their version. Some
tokens of each policy were compared if any are known: sampled tokens if there are enough, with a bound for the dtypes in use. A
server that is nearer to the weights of the step before is told from a server that differs only by its dtype.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning.algorithms.protocol import Batch
from lightning.batch.sample import FloatArray, Sample
from lightning.bounded import Once
from lightning.config import Config
from lightning.engines.logprob_gap import GapBound, bound_for, of_few
from lightning.engines.protocol import Engine, WritesAdapters
from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import hash_weights
from lightning.policy_server.protocol import Probe
from lightning.policy_server.weights import FILES
from lightning.trainer.stack import Stack
from lightning.trainer.training_data import is_of_interest
from lightning.types import POLICY, StepRecord, Transition

logger = logging.getLogger(__name__)


SAMPLED_TOKENS = 64
"""Most sampled tokens of a row that are compared."""
MOST_TOKENS = 1024
"""Most tokens of a probe, with all that comes before the sampled tokens. If the prompt alone is longer, the prompt is
compared."""
MIN_SAMPLED_TOKENS = 8
"""With fewer sampled tokens the prompt is compared too. Its tokens differ by more, because the model finds many of them
unlikely."""
LEAST_TOKENS = 96
"""Tokens of a probe that are enough where the prompt is compared."""
BASELINE = 2.0
"""The gap may be the bound, or this many times the gap before the update if that is larger, because some models round more."""
NOISE = math.sqrt(2.0)
"""An update that moves logprobs by as much as sampler and trainer differ makes this difference this many times as large."""
STEPS_BELOW = 3
"""The number of successive steps below the sampler's noise after which a warning is logged."""


def bound_of(config: Config) -> GapBound:
    """Return the bound for the dtypes in use, or the number in the settings, which no token may exceed."""
    limit = config.trainer.max_logprob_gap
    if limit is None:
        return bound_for(config.engine.dtype, config.policy_server.dtype)
    return GapBound(mean=limit, most=limit, share=1.0)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of a probe. `compared` (T,) says which count; `sampled` (T,) are the sampler's own logprobs, NaN where it gave
    none that can be compared."""

    ids: Sequence[int]
    compared: npt.NDArray[np.bool_]
    sampled: FloatArray


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe: largest and mean gap (nats), and what is wrong, "" if nothing is. The weights are those of
    `policy`."""

    largest: float
    mean: float
    problem: str
    policy: str = POLICY


def _worst(verdict: Verdict) -> tuple[bool, float]:
    """Order verdicts: one with a problem is worse than one without, then a larger mean gap is."""
    return bool(verdict.problem), verdict.mean


class Prober:
    """Chooses the tokens of a probe for each policy, asks the trainer for their logprobs, and judges the policy server's."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine, self._bound = engine, bound_of(config)
        self._tokens: dict[str, list[_Tokens]] = {}
        self._baseline = GapBound(0.0, 0.0, 1.0)
        self._below, self._said = Counter[str](), Once()
        """How many successive updates of each policy were below the sampler's noise."""
        self._noted: dict[str, Probe] = {}
        self._trained: frozenset[str] = frozenset()
        """The policies that have rows in the newest batch."""

    def remember(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Probe every policy that has rows in this batch with their tokens from now on. Gaps of its step, which were measured
        before the update, are the baseline, unless some tokens are of older weights; a gap that the step did not measure is 0
        in it."""
        rows: dict[str, list[Sample]] = {}
        for row in batch.samples:
            rows.setdefault(row.policy, []).append(row)
        self._trained = frozenset(rows)
        self._tokens |= {policy: [_of_row(row) for row in _best(own)] for policy, own in rows.items()}
        if not metrics.get("staleness_max") and "mean_logprob_gap" in metrics:
            self._baseline = GapBound(metrics["mean_logprob_gap"], metrics.get("p999_logprob_gap", 0.0), 1.0)

    def recall(self, prompt: Sequence[int], response: Sequence[int], policy: str = POLICY) -> None:
        """Probe a policy with tokens of a recorded call from now on, as after a resume."""
        ids = [*prompt, *response]
        ids = ids[: _window([(len(prompt), len(ids))], len(ids))[1]]
        sampled = np.arange(len(ids)) >= len(prompt)
        self._tokens[policy] = [_Tokens(ids, _compared(sampled), np.full(len(ids), np.nan, np.float32))]

    def probes(self, attempt: int = 0) -> list[Probe]:
        """Return the trainer's logprobs of some tokens of each policy of which tokens are known, at the second attempt of
        others if there are any."""
        rows = []
        for policy, known in sorted(self._tokens.items()):
            ids = np.asarray(known[attempt % len(known)].ids, dtype=np.int32)
            zeros = np.zeros(len(ids), dtype=np.float32)
            rows.append(Sample(ids, zeros, zeros, zeros, np.full(len(ids), -1, dtype=np.int32), (), policy=policy))
        found = self._engine.logprobs(rows) if rows else []
        return [Probe(row.ids.tolist(), own.tolist(), row.policy) for row, own in zip(rows, found, strict=True)]

    def judge(self, probe: Probe, served: Sequence[float], attempt: int = 0) -> Verdict | None:
        """Judge the server's weights by its logprobs of the probe's tokens, without the first; None if none of the tokens
        counts."""
        known_tokens = self._tokens[probe.policy]
        tokens = known_tokens[attempt % len(known_tokens)]
        chosen = tokens.compared[1:]
        ours, old = np.asarray(probe.logprobs[1:]), tokens.sampled[1:]
        every = np.asarray(probe.gaps(served))
        gaps = every[chosen]
        if not len(gaps):
            return None
        base, few = self._baseline, of_few(len(gaps))
        bound = GapBound(
            max(self._bound.mean, BASELINE * base.mean),
            max(self._bound.most, BASELINE * base.most),
            self._bound.share,
        )
        known = chosen & np.isfinite(old)
        problem = bound.problem_of(gaps)
        if known.sum() >= MIN_SAMPLED_TOKENS and base.mean:
            moved = float(np.mean(np.abs(ours - old)[known]))
            now, before = float(np.mean(every[known])), float(np.mean(np.abs(np.asarray(served) - old)[known]))
            if not problem and now > few * BASELINE * base.mean and before < now:
                problem = f"{now:.3g} nats in the mean, and those of the step before by {before:.3g}"
            known_update = attempt or self._noted.get(probe.policy) is probe  # a second try, or the next server
            if not known_update and probe.policy in self._trained:
                self._noted[probe.policy] = probe
                self._note(probe.policy, moved)
        return Verdict(float(np.max(gaps)), float(np.mean(gaps)), problem, probe.policy)

    def _note(self, policy: str, moved: float) -> None:
        """Warn, once, when updates of a policy are smaller than the difference between sampler and trainer."""
        self._below[policy] = self._below[policy] + 1 if moved < NOISE * self._baseline.mean else 0
        if self._below[policy] == STEPS_BELOW and self._said.first():
            logger.warning(
                "the last %d updates changed logprobs by less than the %.2g nats by which sampler and trainer differ, so that "
                "agents hardly see them: raise engine.lr, or set engine.dtype = 'float32'%s",
                STEPS_BELOW,
                self._baseline.mean,
                _of(policy),
            )


def _of(policy: str) -> str:
    """Return the words that name a policy behind a sentence; empty for the one policy of a run."""
    return "" if policy == POLICY else f" (of the policy {policy!r})"


def _window(sampled: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """Return how many sampled tokens of a row to probe, and after how many of all its tokens the probe ends.

    `sampled` are the ranges of the sampled tokens. The last token of a row is left out: vLLM samples one more, and the row may
    fill the model's context.
    """
    most = min(MOST_TOKENS, max(1, length - 1))
    count = stop = 0
    for start, end in sampled:
        if (taken := min(end - start, SAMPLED_TOKENS - count, most - start)) > 0:
            count, stop = count + taken, start + taken
    if count < MIN_SAMPLED_TOKENS:
        first = min((start for start, _ in sampled), default=length)
        stop = min(most, max(LEAST_TOKENS, first + SAMPLED_TOKENS))
    return count, stop


def _places(row: Sample) -> list[tuple[int, int]]:
    return sorted((span.start, span.stop) for span in row.spans)


def _best(rows: Sequence[Sample]) -> list[Sample]:
    """Return two rows to probe, the better one first: the shortest of those with about the most sampled tokens, then the row
    with the most. If none has enough sampled tokens, the shortest of those with enough tokens at all."""
    windows = {id(row): _window(_places(row), len(row)) for row in rows}
    most = max(count for count, _ in windows.values())
    least = max(MIN_SAMPLED_TOKENS, most - MIN_SAMPLED_TOKENS)

    def order(row: Sample) -> tuple[int, int, int]:
        count, stop = windows[id(row)]
        if most < MIN_SAMPLED_TOKENS:
            return 0, -min(stop, LEAST_TOKENS), stop
        return (0, stop, 0) if count >= least else (1, -count, stop)

    return sorted(rows, key=order)[:2]


def _of_row(row: Sample) -> _Tokens:
    _, stop = _window(_places(row), len(row))
    sampled = np.zeros(len(row), dtype=bool)
    for span in row.spans:
        sampled[span.start : span.stop] = True
    # The server is asked for logprobs at temperature 1, among all ids; weights are 0 where there is no logprob.
    known = sampled & (row.weights != 0) if row.temperature == 1.0 else np.zeros(len(row), dtype=bool)
    if row.mask is not None:
        known &= ~row.mask.is_set
    old = np.where(known, row.logprobs, np.nan).astype(np.float32)
    return _Tokens(row.ids[:stop].tolist(), _compared(sampled[:stop]), old[:stop])


def _compared(sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return sampled if sampled.sum() >= MIN_SAMPLED_TOKENS else np.ones_like(sampled)


HELD_SECONDS = "held_seconds"
"""The metric of a step that says for how long its update held calls."""


class Publisher:
    """Updates the policy server's weights. Calls in flight are frozen while it loads, and new ones wait; no rollout is waited
    for."""

    def __init__(self, stack: Stack, engine: Engine) -> None:
        self._stack, self._engine = stack, engine
        self.prober = Prober(engine, stack.config)
        self._hashing: asyncio.Task[str] | None = None
        self.held = 0.0
        """Seconds for which the last update held calls; the weights are written before."""

    async def publish(self, version: int) -> dict[str, float]:
        """Serve the engine's weights as `version`. Return the probe's gaps (nats) as metrics; empty if nothing was compared.

        A server that does not compute with them gets them once more. Raises `PolicyServerError` when it still does not.
        """
        folder = self._stack.weights_folder.path()
        file = folder / f"version-{version:08d}.safetensors"
        await self.digest()  # which reads the file that is deleted below
        file = await asyncio.to_thread(self._write, file)
        found = await self._bring(file, version)
        self._hashing = asyncio.create_task(asyncio.to_thread(hash_weights, file))  # while agents sample
        for old in folder.glob("version-*"):
            if old != file and self._stack.complete:  # a server that is started again may read it now
                await asyncio.to_thread(shutil.rmtree if old.is_dir() else Path.unlink, old)
        return found

    async def digest(self) -> str:
        """Return the SHA-256 (hex) of the tensors' bytes in the file of the last update (`hash_weights`), which holds all
        weights or adapters alone; "" before the first update, while the policy server has the model folder's weights."""
        return await self._hashing if self._hashing else ""

    def _write(self, file: Path) -> Path:
        """Write the engine's weights, and return where they are; adapters alone if our own vLLM reads them: it has the model's
        folder and merges them as the engine would."""
        server, engine = self._stack.config.policy_server, self._engine
        reads_here = not server.attach and server.weight_transfer in FILES
        adapters = engine.adapters(file) if reads_here and isinstance(engine, WritesAdapters) else None
        return adapters or engine.weights(file)

    async def relabel(self, version: int) -> None:
        """Declare the served weights as `version`: the step that led to it has left them unchanged."""
        began = time.monotonic()
        await self._stack.update(None, version)
        self.held = time.monotonic() - began

    async def recall(self, record: StepRecord, train_agents: Sequence[str]) -> None:
        """Choose the tokens of one trained call of each policy, of a rollout of a committed step, for the next probes."""
        first: dict[str, Transition] = {}
        for attempt in record.rollouts[:1]:
            for call in (await self._stack.store.transitions_of([attempt]))[0]:
                if call.status.answered and is_of_interest(call, train_agents):
                    first.setdefault(call.policy, call)
        for policy, call in first.items():
            self.prober.recall(call.prompt_ids, call.response_ids, policy)

    def _check_served(self, probes: Sequence[Probe], answered: set[str]) -> None:
        """Raise `PolicyServerError` if no server answers for the policy of a probe of several tokens, though none is away."""
        for probe in probes:
            if len(probe.ids) > 1 and probe.policy not in answered and self._stack.complete:
                raise PolicyServerError(
                    f"no policy server answers for the policy {probe.policy!r}, which was to be probed"
                )

    async def _bring(self, file: Path, version: int) -> dict[str, float]:
        """Give the weights to the policy server, and check by a probe that it computes with them. Try twice."""
        for attempt in range(2):
            probes = await asyncio.to_thread(self.prober.probes, attempt)
            began = time.monotonic()
            updates = await self._stack.update(file, version, probes)
            self.held = time.monotonic() - began
            pairs = [pair for update in updates for pair in zip(probes, update.served, strict=False)]
            if pairs:
                self._check_served(probes, {probe.policy for probe, served in pairs if served})
            verdicts = [self.prober.judge(probe, served, attempt) for probe, served in pairs if served]
            found = sorted((verdict for verdict in verdicts if verdict), key=_worst)
            if not found:
                return {}
            verdict = found[-1]
            if not verdict.problem:
                return {"probe_gap": verdict.largest, "probe_gap_mean": verdict.mean}
            told = f"after the update to version {version} the policy server's logprobs differ from the trainer's by "
            told += verdict.problem + _of(verdict.policy)
            if not attempt:
                logger.warning("%s: it is given the weights once more", told)
        raise PolicyServerError(
            f"{told}, also at a second try: it does not serve the trained weights. Nothing is lost; resume the run. If it "
            "comes again, resuming does not help: compare dtypes (policy_server.dtype, engine.dtype), and run lightning doctor "
            "--model FOLDER; trainer.max_logprob_gap sets a bound of your own"
        )
