"""Chooses which of several policy servers gets the calls of an attempt.

The invariant: an attempt's server is chosen once, when its key is issued, and stands in the key. The rollouts of one group
begin alike, so they go to a server that has their beginning in its prefix cache until that server has its share of the running
rollouts; others go to the server with the fewest. A server that is slower ends fewer rollouts, and so gets fewer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.bounded import Bounded
from lightning.gateway.calls import Parts
from lightning.gateway.stages import CallStage
from lightning.gateway.upstream import Slot
from lightning.types import Rollout

RUNS, GROUPS = 64, 4096
"""The most runs, and groups of a run, of which it is remembered where they run."""

Group = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt that has begun at a server: its number among its rollout's, and when it is over at the latest (monotonic
    seconds)."""

    number: int
    server: int
    until: float


class _Run:
    """Where the attempts of one run are. About `expected` of them will run at once (0: unknown)."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._attempts: dict[str, _Attempt] = {}
        self._most = 0
        self._given = Counter[int]()
        self._homes = Bounded[Group, list[int]](GROUPS)

    def begin(self, rollout: Rollout, well: Sequence[int], ttl: float) -> int:
        """Choose one of these servers for an attempt at a rollout, which ends an earlier one, and note it for `ttl` seconds."""
        now = time.monotonic()
        self._attempts = {
            name: each for name, each in self._attempts.items() if each.until > now and name != rollout.id
        }
        load = Counter(each.server for each in self._attempts.values())
        self._most = max(self._most, len(self._attempts) + 1)
        share = -(-max(self._expected, self._most) // len(well))
        group = str(rollout.split), rollout.step, rollout.group
        homes = self._homes.used(group) or self._homes.keep(group, [])
        with_room = [number for number in homes if number in well and load[number] < share]
        chosen = min(with_room or well, key=lambda number: (load[number], self._given[number], number))
        if chosen not in homes:
            homes.append(chosen)
        self._attempts[rollout.id] = _Attempt(rollout.attempt, chosen, now + ttl)
        self._given[chosen] += 1
        return chosen

    def end(self, rollout: Rollout) -> None:
        """Note that the attempt `rollout.attempt` has ended, unless a later one has begun. When all have ended, as many will be
        expected at once as were this time."""
        if (known := self._attempts.get(rollout.id)) is None or known.number != rollout.attempt:
            return
        del self._attempts[rollout.id]
        if not self._attempts:
            self._expected, self._most = self._most, 0


class Placement(CallStage):
    """The stage `replicas`. `agents` is how many are expected to run at once before it is known (0: unknown); `ttl` is the
    seconds after which an attempt whose end nobody reported here counts as over."""

    api = 1

    def __init__(self, agents: int, ttl: float) -> None:
        self._agents, self._ttl = agents, ttl
        self._runs = Bounded[str, _Run](RUNS)

    def placed(self, rollout: Rollout, servers: Sequence[Slot]) -> int | None:
        """Return the number of the attempt's server; None if there are not several."""
        if len(servers) < 2:
            return None
        well = [server.number for server in servers if server.healthy] or [server.number for server in servers]
        run = self._runs.used(rollout.run) or self._runs.keep(rollout.run, _Run(self._agents))
        return run.begin(rollout, well, self._ttl)

    def over(self, rollout: Rollout) -> None:
        """Note that the attempt has ended."""
        if (run := self._runs.get(rollout.run)) is not None:
            run.end(rollout)


def placement(parts: Parts) -> Placement:
    """Make the stage for a gateway. It stands in all gateways of a run alike, also where the policy has a single server."""
    return Placement(parts.agents, parts.config.token_ttl)
