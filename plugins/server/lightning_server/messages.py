"""The control API's requests and answers that are neither nouns of `lightning.types` nor derived by
`lightning_server.operations`: frozen values that client and server share.

The invariant: everything that travels is one of these values, a derived one, or a noun, in the JSON that
`lightning_server.json_codec` derives; neither side knows any other JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lightning.types import LLM, Lease

PREFIX: Final = "/api/v1"
"""The beginning of the path of every request."""
ONCE_HEADER: Final = "idempotency-key"
"""The header with the id that a caller made for its request (`once` of the store's methods)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What was refused, and why: `type` is for programs, `message` names the culprit and the cure."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The body of every error answer."""

    error: Problem


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can do its work: `status` is `ok` or says what is missing."""

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
    """A lease, and the access to the model that its agent needs; `llm` is null where the server has no gateway."""

    lease: Lease
    llm: LLM | None = None


@dataclass(frozen=True, slots=True)
class Leases:
    """What was leased: fewer than asked for when there are no more. `over` is true when the run is finished: there will be no
    more rollouts unless somebody resumes it."""

    leases: tuple[LeasedRollout, ...]
    over: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """Asks to prolong the lease of an attempt that `worker` holds, by `ttl` seconds from now."""

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
