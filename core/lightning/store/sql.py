"""Every SQL text of the store, in the dialect that SQLite and Postgres share.

The invariant: nothing here is particular to one database. Parameters are `?` (a driver that counts them, `$1`, rewrites them:
no literal contains one); upserts are ON CONFLICT; the clock, the locking of rows (`relational.transaction`) and the types of
the schema (`schema`) are the store's. "group" and "index" are reserved words, hence `group_id` and `idx`.
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
RUN_COLUMNS: Final = rows.RUNS.names()
BRIEF_RUN_COLUMNS: Final = RUN_COLUMNS.replace("config", "'{}'")
INSERT_RUN: Final = insert("runs", RUN_COLUMNS, "id")
SELECT_RUN: Final = f"SELECT {RUN_COLUMNS} FROM runs WHERE id = ?"  # noqa: S608
SELECT_RUN_PLACE: Final = "SELECT created_at, n, project FROM runs WHERE id = ?"


def select_runs(*, project: bool, after: bool, brief: bool) -> str:
    """Runs, newest first; the parameters are those asked for: project, time and `n` of the run before them, then their number.

    `brief` leaves their configurations out.
    """
    clauses = [clause for clause, asked in (("project = ?", project), ("(created_at, n) < (?, ?)", after)) if asked]
    where = f"WHERE {' AND '.join(clauses)} " if clauses else ""
    columns = BRIEF_RUN_COLUMNS if brief else RUN_COLUMNS
    return f"SELECT {columns} FROM runs {where}ORDER BY created_at DESC, n DESC LIMIT ?"  # noqa: S608


# rollouts -------------------------------------------------------------------------------------------------------
ROLLOUT_COLUMNS: Final = rows.ROLLOUTS.names()
INSERT_ROLLOUT: Final = insert("rollouts", rows.ROLLOUTS.names(without=rows.EARNED), "id")
SELECT_ROLLOUT: Final = f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE id = ?"  # noqa: S608
SELECT_ROLLOUTS: Final = f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE "  # noqa: S608
"""Followed by `page_conditions` and ORDER_PAGE."""
ORDER_PAGE: Final = " ORDER BY n LIMIT ?"
SELECT_POSITION: Final = (
    "SELECT n, run, group_id, status, attempt, spent, max_attempts, worker, parent FROM rollouts WHERE id = ?"
)
SELECT_OWNER: Final = "SELECT run FROM rollouts WHERE id = ?"
SELECT_PENDING: Final = (
    f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts WHERE run = ? AND status = 'pending' ORDER BY n LIMIT ?"  # noqa: S608
)
SELECT_LAPSED: Final = "SELECT 1 FROM rollouts WHERE run = ? AND status = 'running' AND lease_until <= ? LIMIT 1"
"""Whether any lease of the run has expired: only then the two that follow have anything to find."""
SELECT_EXPIRED: Final = (
    f"SELECT n, {ROLLOUT_COLUMNS} FROM rollouts "  # noqa: S608
    "WHERE run = ? AND status = 'running' AND lease_until <= ? AND spent < max_attempts ORDER BY n LIMIT ?"
)
SELECT_EXHAUSTED: Final = (
    "SELECT n, id, worker, attempt FROM rollouts "
    "WHERE run = ? AND status = 'running' AND lease_until <= ? AND spent >= max_attempts"
)
FAIL_EXHAUSTED: Final = (
    "UPDATE rollouts SET status = 'failed', fault = 'infrastructure', error = ?, lease_until = NULL, worker = '' "
    "WHERE n = ?"
)
TAKE_LEASE: Final = (
    "UPDATE rollouts SET status = 'running', attempt = ?, spent = spent + 1, worker = ?, lease_until = ?, fault = '', "
    "error = '', seconds = 0 WHERE n = ?"
)
RENEW_LEASE: Final = "UPDATE rollouts SET lease_until = ? WHERE id = ?"
END_ROLLOUT: Final = (
    "UPDATE rollouts SET status = ?, reward = ?, rewards = ?, fault = ?, error = ?, seconds = ?, lease_until = NULL, "
    "worker = '' WHERE n = ?"
)
SELECT_HELD: Final = "SELECT n, id, attempt, run FROM rollouts WHERE worker = ? AND status = 'running'"
GIVE_BACK: Final = (
    "UPDATE rollouts SET status = 'pending', spent = spent - 1, worker = '', lease_until = NULL WHERE n = ?"
)
COUNT_ROLLOUTS: Final = (
    "SELECT split, status, count(*) FROM rollouts WHERE run = ? GROUP BY split, status ORDER BY 1, 2"
)
MARK_TRAINED: Final = "UPDATE rollouts SET trained_at_step = ? WHERE id IN "
"""Followed by `places`."""
SELECT_CURRENT: Final = "SELECT id, attempt FROM rollouts WHERE id IN "
"""Followed by `places`."""


def places(count: int) -> str:
    """So many parameters in parentheses."""
    return f"({', '.join('?' * count)})"


def page_conditions(*, split: bool, step: bool, status: bool) -> str:
    """The WHERE clause of a page; its parameters are run, cursor, then those asked for, in this order."""
    clauses = ["run = ?", "n > ?"]
    clauses += [f"{name} = ?" for name, asked in (("split", split), ("step", step), ("status", status)) if asked]
    return " AND ".join(clauses)


# attempts -------------------------------------------------------------------------------------------------------
INSERT_ATTEMPT: Final = "INSERT INTO attempts (rollout, attempt, worker, leased_at) VALUES (?, ?, ?, ?)"
CLOSE_ATTEMPT: Final = "UPDATE attempts SET ended_at = ?, ending = ? WHERE rollout = ? AND attempt = ?"
"""For attempts that ended without an outcome of their own: `expired` or `released`."""
END_ATTEMPT: Final = (
    "UPDATE attempts SET ended_at = ?, ending = ?, outcome_digest = ?, tool_events = ?, step_rewards = ?, labels = ?, "
    "step_states = ?, extras = ? WHERE rollout = ? AND attempt = ?"
)
SELECT_OUTCOME_DIGEST: Final = "SELECT outcome_digest FROM attempts WHERE rollout = ? AND attempt = ?"
SELECT_ATTEMPTS: Final = f"SELECT {rows.ATTEMPTS.names()} FROM attempts WHERE rollout IN "  # noqa: S608
"""Followed by `places`."""
SELECT_LABELS: Final = "SELECT labels FROM attempts WHERE rollout = ? AND attempt = ?"

# transitions ----------------------------------------------------------------------------------------------------
CALL_COLUMNS: Final = rows.CALLS.names("t.")
TRANSITION_COLUMNS: Final = f"t.n, t.parent, t.digest, t.tokens, {CALL_COLUMNS}"
INSERT_TRANSITION: Final = insert(
    "transitions", f"rollout, attempt, parent, {rows.CALLS.names()}, digest, tokens", "rollout, attempt, seq"
)
SELECT_TRANSITION_DIGEST: Final = "SELECT digest, caller FROM transitions WHERE rollout = ? AND attempt = ? AND seq = ?"
SELECT_TRANSITIONS: Final = (
    f"SELECT {TRANSITION_COLUMNS} FROM transitions t JOIN rollouts r ON r.n = t.rollout "  # noqa: S608
    "WHERE r.id = ? AND t.attempt = ? ORDER BY t.seq"
)
MARK_ABORTED: Final = "UPDATE transitions SET status = ?, digest = ? WHERE rollout = ? AND attempt = ? AND seq = ?"
SELECT_LAST_BLOBS: Final = (
    "SELECT n, parent, tokens FROM transitions WHERE rollout = ? AND attempt = ? ORDER BY n DESC LIMIT ?"
)
SELECT_BLOB: Final = "SELECT n, parent, tokens FROM transitions WHERE n = ?"
SELECT_GROUP_ROOTS: Final = (
    "SELECT t.n, t.parent, t.tokens FROM rollouts r JOIN transitions t ON t.rollout = r.n "
    "WHERE r.run = ? AND r.group_id = ? AND t.parent IS NULL ORDER BY t.n DESC LIMIT ?"
)
SELECT_TRUNK: Final = (
    "SELECT t.n, t.parent, t.tokens FROM rollouts r JOIN transitions t ON t.rollout = r.n "
    "WHERE r.run = ? AND r.group_id = ? AND r.id = ? AND t.attempt = ? AND t.seq <= ? ORDER BY t.seq DESC LIMIT ?"
)
"""The calls of an attempt up to one at which it was branched, if it is of this group."""
SELECT_IN_GROUP: Final = (
    "SELECT n FROM transitions WHERE n = ? AND substr(tokens, 1, ?) = ? "
    "AND rollout IN (SELECT n FROM rollouts WHERE run = ? AND group_id = ?)"
)
"""A call by its number, if it has this content and is of this group: whatever is removed together is stored together."""
SELECT_NEXT_SEQ: Final = (
    "SELECT coalesce(max(t.seq) + 1, 0) FROM transitions t JOIN rollouts r ON r.n = t.rollout "
    "WHERE r.id = ? AND t.attempt = ?"
)


# steps, metrics, state ------------------------------------------------------------------------------------------
STEP_COLUMNS: Final = rows.STEPS.names()
INSERT_STEP: Final = insert("steps", STEP_COLUMNS)
SELECT_STEP_DIGEST: Final = "SELECT digest FROM steps WHERE run = ? AND step = ?"
_UNBRIEF: Final = {"rollouts": "'[]'", "digests": "'[]'", "groups": "'[]'", "extras": "NULL"}
BRIEF_STEP_COLUMNS: Final = ", ".join(
    _UNBRIEF.get(field, column) for field, column in zip(rows.STEPS.fields, rows.STEPS.columns, strict=True)
)
"""Without the names of what was trained, and without what plugins keep."""
_STEPS: Final = "FROM steps WHERE run = ? AND step > ? ORDER BY step LIMIT ?"
SELECT_STEPS: Final = f"SELECT {STEP_COLUMNS} {_STEPS}"
SELECT_STEPS_BRIEF: Final = f"SELECT {BRIEF_STEP_COLUMNS} {_STEPS}"
SELECT_LAST_STEP: Final = f"SELECT {STEP_COLUMNS} FROM steps WHERE run = ? ORDER BY step DESC LIMIT 1"  # noqa: S608
SELECT_TRAINED: Final = "SELECT rollouts FROM steps WHERE run = ? AND step >= ?"
SELECT_TRAINABLE: Final = "SELECT id, run, status, fault, attempt, trained_at_step FROM rollouts WHERE id IN "
"""Followed by `places` and ORDER_IDS."""
ORDER_IDS: Final = " ORDER BY id"
"""Rows are locked in this order, so that two transactions that share some do not wait for one another."""


UPSERT_METRIC: Final = (
    "INSERT INTO metrics (run, step, name, value, at) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (run, step, name) DO UPDATE SET value = excluded.value, at = excluded.at"
)
SELECT_METRICS: Final = "SELECT step, name, value, at FROM metrics WHERE run = ? ORDER BY step, name"
UPSERT_STATE: Final = (
    "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO UPDATE SET value = excluded.value"
)
SELECT_STATE: Final = "SELECT value FROM state WHERE run = ? AND name = ?"

KEEP_STATE: Final = "INSERT INTO state (run, name, value) VALUES (?, ?, ?) ON CONFLICT (run, name) DO NOTHING"

# answers to calls that their callers named ----------------------------------------------------------------------
INSERT_ANSWER: Final = (
    "INSERT INTO answers (id, run, until, answer) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
    "SET run = excluded.run, until = excluded.until, answer = excluded.answer WHERE answers.until < ?"
)
KEEP_ANSWER: Final = "UPDATE answers SET answer = ?, until = ? WHERE id = ?"
SELECT_ANSWER: Final = "SELECT answer FROM answers WHERE id = ? AND until >= ?"
SELECT_OLD_ANSWERS: Final = "SELECT id FROM answers WHERE until < ? ORDER BY until LIMIT ?"
FORGET_ANSWER: Final = "DELETE FROM answers WHERE id = ?"
