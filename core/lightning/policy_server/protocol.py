"""The policy server's contract with the trainer and the gateway.

The invariant: at any moment a policy server samples from exactly one version, and everybody who needs to can tell which version
sampled which token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from lightning.types import POLICY


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens and the trainer's logprobs for them: `logprobs[i]` belongs to `ids[i]`; `logprobs[0]` is ignored. They are
    those of the weights of `policy`."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    policy: str = POLICY

    def gaps(self, served: Sequence[float]) -> list[float]:
        """Return |trainer - server| of each token but the first (nats), given the server's logprobs of these; infinite where
        one of the two is not a finite number."""
        found = [abs(ours - theirs) for ours, theirs in zip(list(self.logprobs)[1:], served, strict=True)]
        return [gap if math.isfinite(gap) else math.inf for gap in found]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an update. `in_flight` maps the request id (as the gateway sent it in `x-request-id`; with n > 1 one entry
    `"{choice}_{id}"` each) to how many response tokens the *old* version had sampled when it was frozen.

    A request whose answer is complete but may still be on its way is in it with all its tokens. A request that is absent had
    not begun, and belongs wholly to the new version.
    """

    version: int
    in_flight: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    served: Sequence[Sequence[float]] = ()
    """For each probe the server's logprobs of its tokens, except the first (`Probe.gaps`)."""


class Usage(NamedTuple):
    """What a policy server's requests have needed since it was started, as counts that only grow."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    preemptions: int = 0
    """How often a request lost its place in the KV cache to others, to be computed again."""


class PolicyServer(Protocol):
    """One vLLM, started by us or by others. Its methods raise `PolicyServerError`."""

    @property
    def url(self) -> str:
        """Root URL without `/v1`, e.g. `http://127.0.0.1:8000`."""

    @property
    def model(self) -> str:
        """The served model name requests must carry."""

    @property
    def alias(self) -> str:
        """The served model name that the policy's calls carry: new at each start if we start the server, else `model`."""

    @property
    def models(self) -> Sequence[tuple[str, str]]:
        """Each policy that the server answers, with the model name that its calls carry. Empty for a server with one policy,
        whose calls carry `alias`."""

    @property
    def claim(self) -> str:
        """The word that this trainer left in a server that others run, whose model names identify nothing. Empty if `alias` is
        new at each start."""

    @property
    def version(self) -> int:
        """The version of the weights that it samples from now."""

    async def start(self) -> None:
        """Start (or attach) and return once it answers. On failure the error carries the last lines of its log."""

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        """Put new weights (a safetensors file, or a model's folder) into the running server. None declares the present weights
        as `version`: nothing is loaded and no prefix cache is dropped.

        Order: validate the file, pause (requests in flight freeze), read how far each had come, load, drop the prefix cache,
        set the version, resume, probe (one probe after another). A file that does not fit is refused before anything is paused.
        """

    async def healthy(self) -> bool:
        """Whether the server and its engine answer now."""

    async def usage(self) -> Usage | None:
        """Return what its requests have needed; None if unknown."""

    async def sleep(self) -> None:
        """Free its GPU memory until `wake`; requests wait. Only for a server that was made for `Demand.shares_gpu`."""

    async def wake(self) -> None:
        """Take back its GPU memory and go on with the weights it had."""

    async def wait_died(self) -> None:
        """Return when the server has died without having been stopped; never return while it lives."""

    async def restart(self, weights: Path | None, version: int) -> None:
        """Start a dead server again, with `weights` (None: the model folder's own) as `version`."""

    async def close(self) -> None:
        """Stop the server if we started it; leave an attached one running."""
