"""The SQL statements of keepers, in the dialect that SQLite and PostgreSQL share.

The invariant: no statement is for one kind of database only. Parameters are `?`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from lightning.store.protocol import TRACES_RUN

TABLES: Final = (
    "runs",
    "rollouts",
    "attempts",
    "transitions",
    "steps",
    "metrics",
    "state",
    "revisions",
    "answers",
)
"""Every table with recorded data; a table comes before the tables that refer to it."""

COUNTED: Final = ("runs", "transitions", "steps", "resources", "spans")
BY_STATUS: Final = "SELECT status, count(*) FROM rollouts GROUP BY status"
TOKENS: Final = "SELECT expires_at, revoked_at FROM tokens"
FIRST_RUN: Final = "SELECT min(created_at) FROM runs"
ACTIVITY: Final = (
    "SELECT r.run, max(coalesce(a.ended_at, a.leased_at)) FROM attempts a, rollouts r WHERE r.id = a.rollout GROUP BY 1"
)
BUSY: Final = "SELECT DISTINCT run FROM rollouts WHERE status = 'running' AND lease_until > ?"
BRANCHED: Final = "SELECT DISTINCT run FROM rollouts WHERE parent <> ''"

_MEMBERS: Final = "(SELECT n FROM rollouts WHERE run = ? AND group_id = ?)"
WEIGH_CALLS: Final = (
    "SELECT count(*), coalesce(sum(length(tokens) + coalesce(length(extras), 0)), 0) FROM transitions "  # noqa: S608
    f"WHERE rollout IN {_MEMBERS}"
)
WEIGH_SPANS: Final = f"SELECT count(*) FROM spans WHERE rollout IN {_MEMBERS}"  # noqa: S608
UNENDED: Final = "SELECT count(*) FROM rollouts WHERE run = ? AND group_id = ? AND status IN ('pending', 'running')"
FORGET_CALLS: Final = (
    f"DELETE FROM transitions WHERE rollout IN {_MEMBERS}",  # noqa: S608
    (
        "UPDATE attempts SET tool_events = '[]', step_states = '[]', labels = '{}', extras = NULL "
        "WHERE rollout IN (SELECT id FROM rollouts WHERE run = ? AND group_id = ?)"
    ),
)
FORGET_SPANS: Final = f"DELETE FROM spans WHERE rollout IN {_MEMBERS}"  # noqa: S608
"""Parameters of this statement and of `FORGET_CALLS`: run, group."""
RUNS: Final = "SELECT id FROM runs"
UNNAMED_STATE: Final = "SELECT name, value FROM state WHERE run = ''"
TRACES: Final = f"SELECT name, value FROM state WHERE run = '{TRACES_RUN}'"  # noqa: S608
"""Selects the traces of attempts that gateways keep in the state: a value is `[rollout, attempt, expires_at]`."""
TRACES_AFTER: Final = f"{TRACES} AND name > ? ORDER BY name LIMIT ?"
FORGET_STATE: Final = "DELETE FROM state WHERE run = ? AND name = ?"
ROLLOUTS: Final = "SELECT id FROM rollouts WHERE run = ? ORDER BY id"
FORGET_RUN: Final = (
    "DELETE FROM transitions WHERE rollout IN (SELECT n FROM rollouts WHERE run = ?)",
    "DELETE FROM spans WHERE rollout IN (SELECT n FROM rollouts WHERE run = ?)",
    "DELETE FROM attempts WHERE rollout IN (SELECT id FROM rollouts WHERE run = ?)",
    "DELETE FROM rollouts WHERE run = ?",
    "DELETE FROM steps WHERE run = ?",
    "DELETE FROM metrics WHERE run = ?",
    "DELETE FROM state WHERE run = ?",
    "DELETE FROM revisions WHERE run = ?",
    "DELETE FROM answers WHERE run = ?",
    "DELETE FROM runs WHERE id = ?",
)
"""Remove a run; the parameter of each statement is the run."""
FORGET_OLD_ANSWERS: Final = "DELETE FROM answers WHERE until < ?"


def traces_of(rollouts: Collection[str], traces: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the entries of `TRACES` that belong to one of the rollouts."""
    return [name for name, value in traces if trace_of(value)[0] in rollouts]


def fleet_state(run: str, names: Iterable[str]) -> list[str]:
    """Return the names, among those of the state of the empty run, that belong to a run: its trainer's notice to gateways
    (`policy/RUN`), the trainer's heartbeat (`policy/RUN/alive`), and the gateways' seats (`gateway/RUN/NUMBER`)."""
    notice, seats = f"policy/{run}", f"gateway/{run}/"
    return [
        name
        for name in names
        if name in (notice, f"{notice}/alive") or (name.startswith(seats) and name[len(seats) :].isdecimal())
    ]


def empty_seats(state: Mapping[str, str], runs: Collection[str]) -> list[str]:
    """Return the names in the state of the empty run (`state`: JSON by name) that no trainer and no gateway needs: notices and
    seats of runs that are gone, and seats below the notice's `first`."""
    gone = []
    for name in state:
        place, _, rest = name.partition("/")
        if place == "policy" and rest not in runs and rest.removesuffix("/alive") not in runs:
            gone.append(name)
        run, _, number = rest.rpartition("/")
        if place == "gateway" and number.isdecimal():
            notice = json.loads(state.get(f"policy/{run}", "{}"))
            first = notice.get("first", 0) if isinstance(notice, dict) else 0
            if run not in runs or int(number) < first:
                gone.append(name)
    return gone


def which_are_there(rollouts: Collection[str]) -> str:
    """Return a statement that selects which of these rollouts exist; its parameters are the rollouts."""
    return f"SELECT id FROM rollouts WHERE id IN ({', '.join('?' * len(rollouts))})"  # noqa: S608


def old_traces(traces: Iterable[tuple[str, str]], there: Collection[str], now: float) -> list[tuple[str, str]]:
    """Return the parameters of `FORGET_STATE` for the entries of `TRACES` whose key has expired or whose rollout is not
    `there`."""
    found = [(name, *trace_of(value)) for name, value in traces]
    return [(TRACES_RUN, name) for name, rollout, until in found if until < now or rollout not in there]


def trace_of(value: str) -> tuple[str, float]:
    """Return the rollout and the time of expiry (Unix seconds) in the value of an entry of `TRACES`."""
    rollout, _, expires_at = json.loads(value)
    return rollout, expires_at


def count(table: str) -> str:
    """Return a statement that counts the rows of a table."""
    return f"SELECT count(*) FROM {table}"  # noqa: S608
