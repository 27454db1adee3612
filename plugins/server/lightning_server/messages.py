"""What the control API's requests and answers say beyond the nouns and what `lightning_server.operations` derives: frozen
values that client and server share.

The invariant: everything that travels is one of these, of those, or a noun of `lightning.types`, in the form that
`lightning_server.json_codec` derives; neither side knows any other JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lightning.types import LLM, Lease

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
class Changed:
    """Whether something may have changed, and what to send as `since` to hear of the next change."""

    changed: bool
    since: str
