"""What serves the policy: the contract between the trainer, the gateway and vLLM.

The invariant: at any moment a policy server samples from exactly one version, and everybody who needs to can tell which
version sampled which token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens and the trainer's logprobs for them: `logprobs[i]` belongs to `ids[i]`; `logprobs[0]` is ignored."""

    ids: Sequence[int]
    logprobs: Sequence[float]

    def gaps(self, served: Sequence[float]) -> list[float]:
        """|trainer - server| of each token but the first (nats), given the server's logprobs of these; infinite where one of
        them is no number."""
        found = [abs(ours - theirs) for ours, theirs in zip(list(self.logprobs)[1:], served, strict=True)]
        return [gap if math.isfinite(gap) else math.inf for gap in found]


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did. `in_flight` maps the request id (as the gateway sent it in `x-request-id`; with n > 1 one entry
    `"{choice}_{id}"` each) to how many response tokens the *old* version had sampled when it was frozen.

    A request whose answer is complete but may still be on its way is in it with all its tokens; one that is not in it
    had not begun, and is wholly the new version's."""

    version: int
    in_flight: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    served: Sequence[float] = ()
    """The server's logprobs of the probe's tokens, but the first; see `Probe.gaps`."""


class Usage(NamedTuple):
    """What a policy server's requests have needed since it was started: counts that only grow."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    preemptions: int = 0
    """How often a request had to make room in the KV cache for others; it is computed again."""


class PolicyServer(Protocol):
    """One vLLM, whoever has started it. Raises `PolicyServerError`."""

    @property
    def url(self) -> str:
        """Root URL without `/v1`, e.g. `http://127.0.0.1:8000`."""

    @property
    def model(self) -> str:
        """The served model name requests must carry."""

    @property
    def alias(self) -> str:
        """The served model name that the policy's calls carry: of this start alone where the server is ours, else `model`."""

    @property
    def claim(self) -> str:
        """The word that this trainer has left in a server that others run, since its names say nothing; empty where `alias`
        is of this start alone."""

    @property
    def version(self) -> int:
        """The weight version it samples from now."""

    async def start(self) -> None:
        """Start (or attach) and return once it answers. On failure the error carries the last lines of its log."""

    async def update(self, weights: Path | None, version: int, probe: Probe | None = None) -> Update:
        """Put new weights (a safetensors file, or a model's folder) into the running server. None: those it has are
        `version` from now on, so that nothing is loaded and no prefix cache is dropped.

        Order: validate the file, pause (requests in flight freeze), read how far each had come, load, drop the prefix
        cache, set the version, resume, probe. A file that does not fit is refused before anything is paused.
        """

    async def healthy(self) -> bool:
        """Whether it answers now, engine included."""

    async def usage(self) -> Usage | None:
        """What its requests have needed; None where it does not say."""

    async def sleep(self) -> None:
        """Give its GPU's memory back, with requests waiting, until `wake`. For one that was made for `Demand.shares_gpu`."""

    async def wake(self) -> None:
        """Take its memory back and go on with the weights it had."""

    async def wait_died(self) -> None:
        """Return when the server has died without being asked to; never returns while it lives."""

    async def restart(self, weights: Path | None, version: int) -> None:
        """Bring a dead server back, serving `weights` (None: the model folder's own) as `version`."""

    async def close(self) -> None:
        """Stop what was started; leave alone what was attached."""
