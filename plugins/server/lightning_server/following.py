"""A served model that follows an alias: when the alias moves to another version of the weights, the running vLLM loads that
version.

The invariant: no client sees a token of a version that failed its probe. Calls in flight may end first, and new ones wait at
the gateway. Then the version is loaded and probed while the gateway is closed; if it fails, the previous version is loaded
again before the gateway opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from lightning.config import Config
from lightning.engines.logprob_gap import GapBound, bound_for
from lightning.errors import ConfigError, PolicyServerError, StoreError
from lightning.gateway.gateway import Gateway
from lightning.gateway.policy import Policy
from lightning.policy_server.protocol import PolicyServer, Probe
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.trainer.run_stages import PROBE
from lightning.types import Json
from lightning_resources.nouns import Resource
from lightning_resources.operations import get_resource
from lightning_resources.reference import ResourceReference
from lightning_resources.weights import checked_weights

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks at the alias."""
DRAIN_SECONDS = 60.0
"""Seconds that calls in flight may take to end, or half of `gateway.hold_timeout` if that is less. If they take longer, the
gateway opens again and the update is tried later."""
DRAIN_LOOK = 0.005
MOST_WAIT = 600.0
"""The longest pause in seconds before a version is tried again; the pause doubles with each failed try."""
DROP: Final = 3.0
"""The largest allowed mean fall, in nats per token, of the logprobs of tokens that the previous version sampled. Beyond it the
weights cannot be a better-trained version of the same model."""
LEAST = 8
"""A recorded call is used for the comparison only if it sampled at least this many tokens."""
MOST = 1024
"""At most this many tokens, the last of a call, are compared."""
MOST_LOOKED_AT, LOOKED_AT_ONCE = 1024, 32
"""How many conversations of a run are searched for an answered call, newest first, and how many are read at once. As many may
be unanswered as there are clients."""


async def drained(policy: Policy, seconds: float) -> bool:
    """Wait until vLLM has answered every call that was sent, for `seconds` at most; return whether it has. Call it inside a
    hold, so that no new calls are sent: then all sampled tokens are of the present version."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while policy.sampling:  # noqa: ASYNC110 — each call tells by itself, once an update
                await asyncio.sleep(DRAIN_LOOK)
    policy.freeze()
    return not policy.sampling


@dataclass(frozen=True, slots=True)
class RecordedProbe:
    """Tokens of a version's probe, with the logprobs that the trainer computed for them with these weights in `dtype`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    @classmethod
    def of(cls, resource: Resource) -> RecordedProbe | None:
        """Return the probe in a version's metadata; None where there is none, as for a version that was put by hand."""
        kept = resource.metadata.get(PROBE)
        if not isinstance(kept, Mapping):
            return None
        ids, logprobs = _numbers(kept.get("ids")), _numbers(kept.get("logprobs"))
        if len(ids) != len(logprobs) or len(ids) < 2:
            return None
        return cls(tuple(int(number) for number in ids), tuple(logprobs), str(kept.get("dtype", "")))


def _numbers(value: Json) -> list[float]:
    return [float(str(number)) for number in value] if isinstance(value, list | tuple) else []


@dataclass
class Follower:
    """Keeps a policy server at the version that `reference` points to. `current` is the version that it serves, with its files
    in `folder`. `weights` is the store that has the resource, `served` the store that has the conversations."""

    weights: Store
    reference: ResourceReference
    policy: PolicyServer
    gateway: Gateway
    served: Store
    config: Config
    current: Resource
    folder: Path
    refused: dict[int, str] = field(default_factory=dict)
    """Why versions were refused, by their number, until the alias points to another one."""

    async def follow(self) -> None:
        """Look at the alias for ever, and load the versions that it moves to. Raises `PolicyServerError` when it is not certain
        which version the policy server has."""
        tried, waits = 0, 0.0
        while True:
            await asyncio.sleep(max(LOOK_SECONDS, waits))
            try:
                wanted = await get_resource(self.weights, self.reference.name, self.reference.which)
            except StoreError as error:
                logger.warning("%s is not known, version %d goes on: %s", self.reference, self.current.version, error)
                continue
            if wanted is None or wanted.version == self.current.version:
                self.refused.clear()
                continue
            if wanted.version in self.refused:
                continue
            tried, before = wanted.version, tried
            done = await self.take(wanted)
            waits = 0.0 if done or tried != before else min(MOST_WAIT, 2 * (waits or LOOK_SECONDS))

    async def take(self, wanted: Resource) -> bool:
        """Load a version into the policy server, or refuse it (`refused`). Return True when either was done, False when calls
        in flight did not end in time: the version must be tried again. Raises `PolicyServerError` when the version failed and
        the previous one could not be loaded again."""
        try:
            folder = await asyncio.to_thread(checked_weights, wanted)
        except ConfigError as error:
            self._refuse(wanted, str(error))
            return True
        self.refused.clear()
        own, before = RecordedProbe.of(wanted), await self._known_tokens()
        if own is None and not before:
            logger.warning(
                "%s@%d is loaded without a probe: it was not made by training, and nothing was sampled that it could be "
                "compared with",
                wanted.name,
                wanted.version,
            )
        async with self.gateway.hold():
            if not await drained(self.gateway.own, min(DRAIN_SECONDS, self.config.gateway.hold_timeout / 2)):
                logger.warning("%s@%d waits: calls in flight did not end in time", wanted.name, wanted.version)
                return False
            problem = await self._exchange(wanted, folder, own, before)
        if problem:
            self._refuse(wanted, problem)
        else:
            self.current, self.folder = wanted, folder
            logger.info("%s@%d is served", wanted.name, wanted.version)
        return True

    async def _exchange(self, wanted: Resource, folder: Path, own: RecordedProbe | None, before: Sequence[int]) -> str:
        """Load and probe a version behind the closed gateway; load the previous version again if that fails. Return what was
        wrong, empty for nothing."""
        was = self.current.version
        old = await self._logprobs(None, was, before)
        try:
            served = await self._logprobs(folder, wanted.version, own.ids if own else ())
            problem = "" if own is None else self._fidelity(own, served)
            problem = problem or _drop(old, await self._logprobs(None, wanted.version, before))
        except PolicyServerError as error:
            if self.policy.version == was:  # it was put back before anything was sampled
                return str(error)
            problem = str(error)
        if not problem:
            return ""
        back = await self._logprobs(self.folder, was, before)
        if again := self._bound(self.config.policy_server.dtype).problem_of(np.abs(np.array(back) - np.array(old))):
            self.gateway.own.lose()
            raise PolicyServerError(
                f"{wanted.name}@{wanted.version} failed ({problem}), and version {was} could not be put back: {again}"
            )
        return problem

    async def _logprobs(self, weights: Path | None, version: int, ids: Sequence[int]) -> Sequence[float]:
        """Make the policy server load weights (None: keep its own) as a version, and return its logprobs of the tokens `ids`
        except the first."""
        probes = [Probe(ids, [0.0] * len(ids))] if ids else []
        update = await self.policy.update(weights, version, probes)
        self.gateway.own.update(update)
        return update.served[0] if probes else ()

    def _fidelity(self, own: RecordedProbe, served: Sequence[float]) -> str:
        gaps = np.array(Probe(own.ids, own.logprobs).gaps(served))
        found = self._bound(own.dtype).problem_of(gaps)
        return f"vLLM's logprobs differ from the trainer's by {found}" if found else ""

    def _bound(self, dtype: str) -> GapBound:
        return bound_for(dtype, self.config.policy_server.dtype)

    def _refuse(self, wanted: Resource, why: str) -> None:
        self.refused[wanted.version] = why
        logger.error(
            "%s@%d is not served, version %d goes on: %s. Move the alias: lightning resources rollback %s --alias %s",
            wanted.name,
            wanted.version,
            self.current.version,
            why,
            wanted.name,
            self.reference.which,
        )

    async def _known_tokens(self) -> tuple[int, ...]:
        """Return tokens that the present version sampled, with their context: those of its own probe, or of the last answered
        call. Empty where there are none."""
        if (own := RecordedProbe.of(self.current)) is not None:
            return own.ids
        for run in await self.served.list_runs(brief=True):
            begun = deque([each async for each in each_rollout(self.served, run.id) if each.attempt], MOST_LOOKED_AT)
            while begun:  # the newest first; those that are being answered have no call yet
                part = [begun.pop() for _ in range(min(LOOKED_AT_ONCE, len(begun)))]
                for calls in await self.served.transitions_of([(rollout.id, rollout.attempt) for rollout in part]):
                    for call in reversed(calls):
                        if call.status.answered and len(call.response_ids) >= LEAST:
                            return (*call.prompt_ids, *call.response_ids)[-MOST:]
        return ()


def _drop(old: Sequence[float], new: Sequence[float]) -> str:
    """Return what is wrong when tokens of the previous version became too unlikely or impossible; empty for nothing. `old` and
    `new` are their logprobs before and after the update."""
    if not old:
        return ""
    fell = float(np.mean(old)) - float(np.mean(new))
    if math.isfinite(fell) and fell <= DROP:
        return ""
    return f"what the version before has sampled became {fell:.3g} nats less likely per token, more than {DROP:g}"
