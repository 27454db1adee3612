"""The SQL with which a database is looked after, in the dialect that SQLite and Postgres share.

The invariant: nothing here is particular to one database; parameters are `?`.
"""

from __future__ import annotations

from typing import Final

TABLES: Final = (
    "runs",
    "rollouts",
    "attempts",
    "transitions",
    "spans",
    "steps",
    "metrics",
    "state",
    "resources",
    "aliases",
    "tokens",
    "revisions",
)
"""Every table that holds what was recorded, those before that others refer to. Older schemas have fewer."""

COUNTED: Final = ("runs", "transitions", "spans", "steps", "resources")
BY_STATUS: Final = "SELECT status, count(*) FROM rollouts GROUP BY status"
TOKENS: Final = "SELECT expires_at, revoked_at FROM tokens"
FIRST_RUN: Final = "SELECT min(created_at) FROM runs"
ACTIVITY: Final = (
    "SELECT r.run, max(coalesce(a.ended_at, a.leased_at)) FROM attempts a, rollouts r WHERE r.id = a.rollout GROUP BY 1"
)
BUSY: Final = "SELECT DISTINCT run FROM rollouts WHERE status = 'running' AND lease_until > ?"

_MEMBERS: Final = "(SELECT n FROM rollouts WHERE run = ? AND group_id = ?)"
WEIGH_CALLS: Final = f"SELECT count(*), coalesce(sum(length(tokens)), 0) FROM transitions WHERE rollout IN {_MEMBERS}"  # noqa: S608
WEIGH_SPANS: Final = f"SELECT count(*) FROM spans WHERE rollout IN {_MEMBERS}"  # noqa: S608
UNENDED: Final = (
    "SELECT count(*) FROM rollouts WHERE run = ? AND group_id = ? AND status NOT IN ('succeeded', 'failed')"
)
FORGET_CALLS: Final = (
    f"DELETE FROM transitions WHERE rollout IN {_MEMBERS}",  # noqa: S608
    f"DELETE FROM spans WHERE rollout IN {_MEMBERS}",  # noqa: S608
    (
        "UPDATE attempts SET tool_events = '[]', step_rewards = '[]', labels = '{}' "
        "WHERE rollout IN (SELECT id FROM rollouts WHERE run = ? AND group_id = ?)"
    ),
)
"""Parameters of each: run, group."""
FORGET_RUN: Final = (
    "DELETE FROM transitions WHERE rollout IN (SELECT n FROM rollouts WHERE run = ?)",
    "DELETE FROM spans WHERE rollout IN (SELECT n FROM rollouts WHERE run = ?)",
    "DELETE FROM attempts WHERE rollout IN (SELECT id FROM rollouts WHERE run = ?)",
    "DELETE FROM rollouts WHERE run = ?",
    "DELETE FROM steps WHERE run = ?",
    "DELETE FROM metrics WHERE run = ?",
    "DELETE FROM state WHERE run = ?",
    "DELETE FROM revisions WHERE run = ?",
    "DELETE FROM runs WHERE id = ?",
)
"""Parameter of each: run."""


def count(table: str) -> str:
    """How many rows one of `TABLES` has."""
    return f"SELECT count(*) FROM {table}"  # noqa: S608
