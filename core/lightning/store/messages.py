"""What the control API's requests and answers say beyond the nouns: frozen values that client and server share.

The invariant: everything that travels is one of these or a noun of `lightning.types`, in the form that `store.json_codec`
derives; neither side knows any other JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning.store.protocol import Attempt, RolloutCount
from lightning.types import LLM, Json, Lease, Outcome, Rollout, Span, Transition

ONCE_HEADER: Final = "idempotency-key"
"""The header in which a request carries its caller's id for it (`once` of the store's methods)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What was refused, and why: `type` is for programs, `message` names the culprit and the cure."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The body of every answer that says no."""

    error: Problem


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can do its work; `status` is `ok` or says what is missing."""

    status: str


@dataclass(frozen=True, slots=True)
class Version:
    """The release of the server, and the scope and project of the token that asks (`*`: all projects)."""

    version: str
    api: str
    scope: str
    project: str


@dataclass(frozen=True, slots=True)
class NewRollouts:
    """Rollouts to create. Those whose id exists already in the same run are left as they are."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Created:
    """How many were new."""

    created: int


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A worker asks for up to `limit` rollouts of a run, for `ttl` seconds each."""

    run: str
    worker: str
    limit: int = field(default=1, metadata={"minimum": 0})
    ttl: float = 60.0


@dataclass(frozen=True, slots=True)
class LeasedRollout:
    """A lease, and what its agent needs to call the model; `llm` is null where the server has no gateway."""

    lease: Lease
    llm: LLM | None = None


@dataclass(frozen=True, slots=True)
class Leases:
    """What was leased; fewer than asked for when there is no more. `over` is true when the run has come to its end: there will
    be no more unless somebody resumes it."""

    leases: tuple[LeasedRollout, ...]
    over: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """The holder of an attempt prolongs its lease by `ttl` seconds from now."""

    worker: str
    ttl: float = 60.0


@dataclass(frozen=True, slots=True)
class Expiry:
    """When a lease ends: Unix seconds by the database's clock."""

    expires_at: float


@dataclass(frozen=True, slots=True)
class Completion:
    """How an attempt ended, with its tool events, step rewards and labels."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Release:
    """A worker gives back everything it holds."""

    worker: str


@dataclass(frozen=True, slots=True)
class Released:
    """How many rollouts were given back."""

    released: int


@dataclass(frozen=True, slots=True)
class Transitions:
    """Calls to store durably."""

    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """How many were new."""

    appended: int


@dataclass(frozen=True, slots=True)
class Attempts:
    """Attempts to read, as pairs of a rollout's id and an attempt's number."""

    attempts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TransitionsOf:
    """The calls of the first attempts that were asked for, in order, as many as fit into one answer; ask again for the rest."""

    transitions: tuple[tuple[Transition, ...], ...]


@dataclass(frozen=True, slots=True)
class AnyAttempts:
    """Attempts to read, as pairs of a rollout's id and an attempt's number; null stands for the current attempt."""

    attempts: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class AttemptsOf:
    """The first attempts that were asked for, in order, as many as fit into one answer; ask again for the rest."""

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """How many rollouts of a run there are by split and status."""

    counts: tuple[RolloutCount, ...]


@dataclass(frozen=True, slots=True)
class NextSeq:
    """The first unused `seq` of an attempt."""

    seq: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans to store durably."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """How many of them are stored now, those that were before included."""

    stored: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Values to merge into the metrics of a step."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateValue:
    """A small JSON value; null when none is kept."""

    value: Json = None


@dataclass(frozen=True, slots=True)
class Target:
    """The version that an alias is to point to."""

    version: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Whether something may have changed, and what to send as `since` to hear of the next change."""

    changed: bool
    since: str
