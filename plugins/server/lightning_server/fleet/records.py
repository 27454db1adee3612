"""What the trainer that owns a policy and the gateways that serve it tell each other, and the store's keys for it.

The invariant: all messages are in the store's state under the empty run. A key has one writer at a time, except while a seat is
claimed, which `keep_state` decides.

    policy/RUN          the owner's notice: servers, weight version, and whether calls are held
    policy/RUN/alive    the owner's heartbeat, only while it holds calls
    gateway/RUN/0, 1..  one seat for each gateway that serves the run, taken in order; from the notice's `first` on, no seat
                        is given to a second gateway

An update: the owner announces a hold under a new epoch, then reads the seats. A gateway that reads the announcement stops
sending calls, then writes the epoch and its calls in flight into its seat. A gateway that takes a seat reads the notice after
that. So either the owner sees a gateway that may have sent calls, or that gateway sees the hold. When each seat has
acknowledged or is gone, the owner updates, and announces the version with the tokens that each call had then.

Nobody compares clocks. A seat is gone when the owner has seen its heartbeat unchanged for `GONE` seconds of its own clock. A
gateway gives its seat up for good when `LAPSE` seconds of its own clock, which are fewer, have passed since it began the last
heartbeat that the store has acknowledged.

Seats below the notice's `first` are gone, and a gateway that has such a seat gives it up: pruning a database deletes them
(`lightning_db.queries.empty_seats`), so that a gateway that read an older notice may take their numbers again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar, cast

from lightning.gateway.upstream import Upstream
from lightning.store.protocol import Store
from lightning.types import Json

from lightning_server.json_codec import codec_of

BEAT = 1.0
"""Seconds between two heartbeats."""
LAPSE = 4.0
"""Seconds after which a gateway that could not renew its seat gives the seat up."""
GONE = 5.0
"""Seconds without a heartbeat after which others take a gateway, or an owner that holds calls, for gone."""


def now() -> float:
    """Return seconds of a clock that never jumps, and on Linux also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Stance(StrEnum):
    """What gateways do with new calls. `OPEN`: send them. `HELD`: keep them waiting, or those of the server that the notice
    names, and acknowledge that. `PAUSED`: only keep them waiting, because every server is away."""

    OPEN = "open"
    HELD = "held"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Notice:
    """What an owner announces of its policy.

    `epoch` counts holds, and changes of owner. `version` is that of the newest weights, which were loaded in epoch `updated`.
    `versions` are those of the `servers`, in their order (empty: all have the newest). `counts` has the response tokens that
    each call in flight had at the update. `taken` are the seats that had acknowledged the last ended hold. Seats below `first`
    are gone. `seed` seeds calls, None where they are not seeded.

    Servers keep their places while they are started again: `away` are the places of those that are. `holds` is the place of the
    server whose calls a `HELD` notice holds, `changed` that of the server which took the newest weights in epoch `updated`;
    None is every server.
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
    away: tuple[int, ...] = ()
    holds: int | None = None
    changed: int | None = None

    @property
    def ended(self) -> int:
        """The epoch of the last hold that has ended."""
        return self.epoch - (self.stance is Stance.HELD)

    @property
    def version_of(self) -> dict[Upstream, int]:
        """The version of the weights that each server has."""
        return dict(zip(self.servers, self.versions or (self.version,) * len(self.servers), strict=True))

    @property
    def started_again(self) -> tuple[Upstream, ...]:
        """The servers that are started again, as they were before."""
        return tuple(self.servers[place] for place in self.away)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a gateway says of itself. `ack` is the epoch of the newest hold that it has acknowledged, `keys` its calls in flight
    at that hold, as `Update.in_flight` names them. A gateway that has `left` never comes back under this seat."""

    id: str
    beat: int = 0
    ack: int = 0
    keys: tuple[str, ...] = ()
    left: bool = False


Word = TypeVar("Word", Notice, Seat)


def to_json(said: Notice | Seat) -> Json:
    """Return a notice or a seat as JSON for the store."""
    return codec_of(type(said)).encode(said)


def from_json(kind: type[Word], kept: Json) -> Word | None:
    """Read what `to_json` wrote; None when nothing was stored. Fields of a newer release are ignored."""
    return None if kept is None else cast("Word", codec_of(kind).decode(kept, "what a fleet has kept", False))


async def notice_of(store: Store, run: str) -> Notice | None:
    """Return the notice of a run's owner; None where there is none yet."""
    return from_json(Notice, await store.get_state("", notice_key(run)))


def notice_key(run: str) -> str:
    """Return the key of the owner's notice."""
    return f"policy/{run}"


def alive_key(run: str) -> str:
    """Return the key of the owner's heartbeat."""
    return f"policy/{run}/alive"


def seat_key(run: str, number: int) -> str:
    """Return the key of a seat."""
    return f"gateway/{run}/{number}"
