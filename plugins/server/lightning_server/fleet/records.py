"""What the trainer that owns a policy and the gateways that serve it tell each other, and where in the store it lies.

The invariant: everything is said in the store's state under the empty run; a key has one writer at a time, but for the claim
of a seat, which `keep_state` decides.

    policy/RUN          the owner's notice: servers, weight version, and whether calls are held
    policy/RUN/alive    the owner's heartbeat, only while it holds calls
    gateway/RUN/0, 1..  one seat for each gateway that serves the run, taken in order; from the notice's `first` on, none is
                        ever given to a second one

An update: the owner announces a hold under a new epoch, then reads the seats. A gateway that reads the announcement stops
dispatching, then writes the epoch and its calls in flight into its seat. A gateway that takes a seat reads the notice after
that. So the owner sees every gateway that may have dispatched, or that gateway sees the hold. When each seat has
acknowledged or is gone the owner updates, and announces the version with the tokens that each call had then.

Nobody compares clocks. A seat is gone when the owner has seen its heartbeat unchanged for `GONE` seconds of its own clock; a
gateway gives its seat up for good when `LAPSE` seconds of its own, fewer, have passed since it began the last heartbeat that
the store has acknowledged.

Seats below the notice's `first` are gone, and whoever finds to have one gives it up: pruning a database removes them
(`lightning_db.queries.empty_seats`), so that their numbers may be taken once more by a gateway that read an older notice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, cast

from lightning.gateway.upstream import Upstream
from lightning.types import Json

BEAT = 1.0
"""Seconds between two heartbeats."""
LAPSE = 4.0
"""Seconds after which a gateway that could not renew its seat takes itself for out."""
GONE = 5.0
"""Seconds without a heartbeat after which others take a gateway, or an owner that holds calls, for gone."""


def now() -> float:
    """Seconds of a clock that never jumps, and on Linux goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Stance(StrEnum):
    """What gateways do with new calls: `OPEN` sends them; `HELD` keeps them and acknowledges; `PAUSED` only keeps them."""

    OPEN = "open"
    HELD = "held"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Notice:
    """What an owner says of its policy.

    `epoch` counts its holds (and owners). `version` is that of the newest weights, since epoch `updated`, `versions` those that
    the servers have, in their order (empty: all have the newest), and `counts` says how many response tokens calls in flight
    had then; `taken` are the seats that had acknowledged the last hold that ended. Seats below
    `first` are gone. `seed` is what calls are seeded with, None where they are not.
    """

    owner: str
    epoch: int
    stance: Stance
    version: int
    updated: int
    servers: tuple[Upstream, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    taken: tuple[int, ...] = ()
    first: int = 0
    seed: int | None = None
    versions: tuple[int, ...] = ()

    @property
    def ended(self) -> int:
        """The epoch of the last hold that has ended."""
        return self.epoch - (self.stance is Stance.HELD)

    @property
    def version_of(self) -> dict[Upstream, int]:
        """The version of the weights that each server has."""
        return dict(zip(self.servers, self.versions or (self.version,) * len(self.servers), strict=True))

    def to_json(self) -> Json:
        """For the store."""
        said = {item.name: getattr(self, item.name) for item in fields(self)}
        servers = [[server.url, server.model, server.claim] for server in self.servers]
        return {
            **said,
            "stance": self.stance.value,
            "servers": servers,
            "counts": {**self.counts},
            "taken": [*self.taken],
            "versions": [*self.versions],
        }

    @classmethod
    def from_json(cls, kept: Json) -> Notice | None:
        """What `to_json` wrote; None when nothing was kept."""
        if kept is None:
            return None
        said = _fields_of(cls, kept)
        servers = tuple(Upstream(*server) for server in said["servers"])
        lists = {name: tuple(said[name]) for name in ("taken", "versions")}
        return cls(**{**said, "stance": Stance(said["stance"]), "servers": servers, **lists})


@dataclass(frozen=True, slots=True)
class Seat:
    """What a gateway says of itself. `ack` is the newest hold it keeps or kept, `keys` its calls in flight in that one, as
    `Update.in_flight` names them; a gateway that has `left` never comes back under this seat."""

    id: str
    beat: int = 0
    ack: int = 0
    keys: tuple[str, ...] = ()
    left: bool = False

    def to_json(self) -> Json:
        """For the store."""
        return {"id": self.id, "beat": self.beat, "ack": self.ack, "keys": list(self.keys), "left": self.left}

    @classmethod
    def from_json(cls, kept: Json) -> Seat | None:
        """What `to_json` wrote; None when nothing was kept."""
        if kept is None:
            return None
        said = _fields_of(cls, kept)
        return cls(**{**said, "keys": tuple(said["keys"])})


def _fields_of(kind: type[Notice | Seat], kept: Json) -> dict[str, Any]:
    """What was kept of each field; others, of a newer version, are left aside."""
    said = cast("dict[str, Any]", kept)
    return {item.name: said[item.name] for item in fields(kind)}


def notice_key(run: str) -> str:
    """Where the owner's notice lies."""
    return f"policy/{run}"


def alive_key(run: str) -> str:
    """Where the owner's heartbeat lies."""
    return f"policy/{run}/alive"


def seat_key(run: str, number: int) -> str:
    """Where a seat lies."""
    return f"gateway/{run}/{number}"
