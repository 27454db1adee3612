"""Statements with the columns of nouns, and those that are run in several places; the others stand where they are run.

The invariant: all are of the dialect that SQLite and Postgres share. Parameters are `?` (a driver that counts them, `$1`,
rewrites them: no literal contains one); upserts are ON CONFLICT; the clock, the locking of rows (`relational.transaction`) and
the types of the schema (`schema`) are the store's. "group" and "index" are reserved words, hence `group_id` and `idx`.
"""

from __future__ import annotations

from typing import Final

from lightning.store import rows


def insert(table: str, columns: str, conflict: str = "") -> str:
    """A statement that inserts these columns; `conflict` are the columns of the key of rows to leave out that exist."""
    places = ", ".join("?" for _ in columns.split(", "))
    left_out = f" ON CONFLICT ({conflict}) DO NOTHING" if conflict else ""
    return f"INSERT INTO {table} ({columns}) VALUES ({places}){left_out}"  # noqa: S608


ALL: Final = 2**63 - 1
"""The LIMIT of a list without one."""
INSERT_RUN: Final = insert("runs", rows.RUNS.names(), "id")
RUN_COLUMNS: Final = rows.RUNS.names()
BRIEF_RUN_COLUMNS: Final = rows.RUNS.names(blank={"config": "'{}'"})
"""Without their configurations."""


# rollouts -------------------------------------------------------------------------------------------------------
ROLLOUT_COLUMNS: Final = rows.ROLLOUTS.names()
INSERT_ROLLOUT: Final = insert("rollouts", rows.ROLLOUTS.names(without=rows.EARNED), "id")
SELECT_ROLLOUT: Final = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE id = ?"  # noqa: S608
SELECT_POSITION: Final = (
    "SELECT n, run, group_id, status, attempt, spent, max_attempts, worker, parent FROM rollouts WHERE id = ?"
)
SELECT_PENDING: Final = (
    f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE run = ? AND status = 'pending' ORDER BY n LIMIT ?"  # noqa: S608
)
SELECT_EXPIRED: Final = (
    f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts "  # noqa: S608
    "WHERE run = ? AND status = 'running' AND lease_until <= ? AND spent < max_attempts ORDER BY n LIMIT ?"
)
RENEW_LEASE: Final = "UPDATE rollouts SET lease_until = ? WHERE id = ?"
GIVE_BACK: Final = (
    "UPDATE rollouts SET status = 'pending', spent = spent - 1, worker = '', lease_until = NULL WHERE n = ?"
)


def places(count: int) -> str:
    """So many parameters in parentheses."""
    return f"({', '.join('?' * count)})"


# attempts -------------------------------------------------------------------------------------------------------
CLOSE_ATTEMPT: Final = "UPDATE attempts SET ended_at = ?, ending = ? WHERE rollout = ? AND attempt = ?"
"""For attempts that ended without an outcome of their own: `expired` or `released`."""
INSERT_ATTEMPT: Final = insert("attempts", "rollout, attempt, worker, leased_at")
SELECT_ATTEMPTS: Final = f"SELECT {rows.ATTEMPTS.names()} FROM attempts WHERE rollout IN "  # noqa: S608
"""Followed by `places`."""

# transitions ----------------------------------------------------------------------------------------------------
INSERT_TRANSITION: Final = insert(
    "transitions", f"rollout, attempt, parent, {rows.CALLS.names()}, digest, tokens", "rollout, attempt, seq"
)
SELECT_TRANSITIONS: Final = (
    f"SELECT t.n, t.parent, t.digest, t.tokens, {rows.CALLS.names('t.')} FROM transitions t JOIN rollouts r ON r.n = t.rollout "  # noqa: S608
    "WHERE r.id = ? AND t.attempt = ? ORDER BY t.seq"
)
SELECT_BLOB: Final = "SELECT n, parent, tokens FROM transitions WHERE n = ?"
SELECT_GROUP_ROOTS: Final = (
    "SELECT t.n, t.parent, t.tokens FROM rollouts r JOIN transitions t ON t.rollout = r.n "
    "WHERE r.run = ? AND r.group_id = ? AND t.parent IS NULL ORDER BY t.n DESC LIMIT ?"
)

# steps ----------------------------------------------------------------------------------------------------------
INSERT_STEP: Final = insert("steps", rows.STEPS.names())
STEP_COLUMNS: Final = rows.STEPS.names()
BRIEF_STEP_COLUMNS: Final = rows.STEPS.names(
    blank={"rollouts": "'[]'", "digests": "'[]'", "groups": "'[]'", "extras": "NULL"}
)
"""Without the names of what was trained, and without what plugins keep."""
