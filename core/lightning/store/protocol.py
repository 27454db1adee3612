"""The methods of every store, whichever database is behind it.

The invariant: every acknowledged write is durable; work is delivered at least once and takes effect exactly once.
`(rollout, attempt)` fences late writers, and `(rollout, attempt, seq)` makes appends idempotent. Methods may be awaited
from any event loop of the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from lightning.types import (
    Json,
    Lease,
    Outcome,
    Rollout,
    Run,
    Status,
    StepRecord,
    StepReward,
    StepState,
    ToolEvent,
    Transition,
)

if TYPE_CHECKING:
    from lightning.store.operation import Operation

T = TypeVar("T")

PRUNED: Final = "pruned"
"""The key of a run's state that records removed calls: `at` (Unix seconds), `rollouts` (how many rollouts lost their calls),
`trained` (whether some of these rollouts had been trained)."""

TRACES_RUN: Final = "gateway/traces"
"""The run id under which gateways keep the traces of attempts in the state: `[rollout, attempt, expires_at]` by trace. No run
has this id, because a run's id is the name of a folder."""

KNOWN_SECONDS: Final = 3600.0
"""Seconds for which a store keeps the answer of a call that its caller named (`once`)."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and the cursor of the next page, which is empty on the last page."""

    items: tuple[T, ...]
    cursor: str = ""


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The metrics of one step of a run; `at` is Unix time by the database's clock."""

    step: int
    values: Mapping[str, float]
    at: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """The parts of an attempt's outcome besides its reward; none for an attempt that has not ended. `attempt` is its number."""

    rollout: str
    attempt: int
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    step_states: tuple[StepState, ...] = ()
    extras: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """The number of rollouts of a run that have this split and this status."""

    split: str
    status: Status
    rollouts: int


class RunWatch(Protocol):
    """Notices changes of a run: rollouts created, ended or given back, steps, and state. Leases and model calls are not
    noticed, because they would wake tasks that wait for work or for outcomes."""

    async def wait(self, timeout: float) -> bool:
        """Return True as soon as something may have changed since the last call (the first time: since the watch began), and
        False after `timeout` seconds without a change. True may come without a change, but no change is missed."""


class Store(Protocol):
    """The one source of truth. Every method raises `StoreError` (or a subclass) when the database refuses.

    A caller may repeat a call whose answer was lost. A method that is not idempotent takes `once`, any text that is unique to
    the call. For `KNOWN_SECONDS` the same call with the same `once` changes nothing and returns the same answer. With other
    arguments it is another call.
    """

    async def open(self, *, make: bool = True) -> None:
        """Connect, and make the store if there is none. Idempotent.

        Raises `SchemaError` for a corrupt schema or another one. Without `make` raises `ConfigError` or `SchemaError` if there
        is no store.
        """

    async def close(self) -> None:
        """Write everything acknowledged to the database and disconnect. Idempotent."""

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation of the store or of a plugin; `arguments` are all of its arguments by name. Raises `StoreError` for a
        plugin's operation that this store, or the server behind it, has no functions for.

        Callers use the operation itself, which has types: `await put_note(store, note)`.
        """

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """Create the run and return it. If its id exists, return the stored run unchanged."""

    async def get_run(self, run: str) -> Run | None:
        """Return the run; None if it does not exist."""

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """Return all runs, or those of a project, newest first: at most `limit` of the runs behind the run `after`. With
        `brief` each run has an empty `config`, which may be large.

        Raises `DataError` for a limit below 1, and if `after` is not one of the runs.
        """

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """Watch a run for changes by any process or task; `run=""` watches the state that belongs to no run.

        Enter the context, read the store, then wait: a change between the read and the wait is not lost.
        """

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """Insert the rollouts whose ids are new, and return how many are. Rollouts whose ids exist stay as they are.

        Raises `ConflictError`, and inserts none, if another run has a rollout with one of the ids.
        """

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """Return the rollout as it is now; None if it does not exist."""

    async def list_rollouts(
        self,
        run: str,
        *,
        split: str | None = None,
        step: int | None = None,
        status: Status | None = None,
        cursor: str = "",
        limit: int = 1000,
    ) -> Page[Rollout]:
        """Return a page of a run's rollouts in creation order: those with this split, step and status. `cursor` is that of the
        page before; empty for the first page."""

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """Return how many rollouts a run has by split and status, without counts of 0."""

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """Take up to `limit` pending rollouts (creation order), or running ones whose lease expired, as a new attempt.

        A rollout whose lease expired on its last allowed attempt becomes failed (`Fault.INFRASTRUCTURE`) instead. With
        `limit=0` and without `once` the call does nothing else. The clock is the database's; `ttl` is in seconds.

        While its leases last, the same call with the same `once`, whatever its `limit`, returns those of them that the worker
        still holds, renewed for `ttl` seconds. With `limit=0` it takes no other rollouts.
        """

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """Renew a lease for `ttl` seconds from now, and return it. Raises `StaleAttemptError` if a later attempt has begun, if
        the attempt has ended, or if another worker holds it."""

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """End an attempt and store its whole outcome, atomically. Return the rollout.

        A reward makes the rollout succeeded. `Fault.INFRASTRUCTURE` makes it pending again while attempts are left. Without
        `spend` such an attempt does not count, as after `release`, up to `rollout_state.EXCUSED` times. `Fault.CANCELLED` makes
        the rollout cancelled, other faults make it failed. The same call again returns the same rollout. Raises
        `StaleAttemptError` for another outcome of an ended attempt and for an attempt that is not the newest; `DataError` for a
        NaN or infinite reward and for extras that `lightning.store.rows` refuses.

        `outcome.labels` become the callers of the attempt's transitions with these ids, and `outcome.untrained` the reasons why
        they are not trained; unknown ids are ignored.
        """

    async def release(self, worker: str, *, once: str = "") -> int:
        """Make every rollout that `worker` has leased pending again, and return how many. The released attempts do not count
        against `max_attempts`.

        A runner calls it when it restarts or drains. The next lease still raises the attempt number, which fences late writers
        of the released attempt.
        """

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """Store calls durably before returning, and return how many are new.

        A call whose key and content are stored changes nothing; what a label replaced (the caller, the reason) is not compared.
        If a stored call was answered and the same call comes as aborted, it is aborted from then on: its answer did not arrive.
        Raises `ConflictError` for other content under a stored key, `StaleAttemptError` for a new call of an attempt that is
        not the newest or has ended, `StoreError` for an unknown rollout, and `DataError` for extras that `lightning.store.rows`
        refuses.
        """

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """Return the `seq` behind the last call of an attempt; 0 for an attempt without calls."""

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """Return the calls of an attempt in `seq` order. `attempt=None` is the rollout's newest attempt."""

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """Return the calls of each `(rollout, attempt)`, in the order of `attempts`."""

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """Return the end of each `(rollout, attempt)`, in the order of `attempts`. An attempt of None is the rollout's newest.

        Raises `StoreError` for an unknown rollout.
        """

    # steps and metrics ------------------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """Record an optimizer step and mark its rollouts as trained, atomically. The same step again changes nothing.

        Raises `ConflictError` if the step is stored with another digest, if another step trained one of the rollouts and no
        reuse is declared, or if it was reused more often than declared (`rollout_state.reuse_of`). Raises `StaleAttemptError`
        if the named attempt is not the rollout's last, which must have succeeded or failed by the policy. Raises `DataError`
        for a step below 1 and for extras that `lightning.store.rows` refuses.
        """

    async def steps(
        self, run: str, *, after: int = 0, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """Return the committed steps behind the step `after` in order, at most `limit`. With `brief` each step is without
        `rollouts`, `digests`, `groups` and `extras`, which are most of a step: 40 KB for 512 rollouts.

        Raises `DataError` for a limit below 1.
        """

    async def last_step(self, run: str) -> StepRecord | None:
        """Return the committed step with the largest number; None without steps."""

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """Add values to the metrics of a step, in place of earlier values of the same names."""

    async def metrics(self, run: str) -> list[MetricPoint]:
        """Return the metrics of a run, sorted by step."""

    # small state ------------------------------------------------------------------------------------------------
    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """Keep a small JSON value under a key of a run, in place of an older value; an example is the gateway's signing secret.

        `once=None` says that nobody else writes the key at the same time, so that a repeated call does no harm and the store
        need not keep its answer.
        """

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """Keep a value if the key has none, and return the kept value. So several processes agree on one value."""

    async def get_state(self, run: str, key: str) -> Json:
        """Return the value under a key; None if there is none."""

    # resources -----------------------------------------------------------------------------------


@runtime_checkable
class ShowsProject(Protocol):
    """A store that may show only one project, under that project's own names."""

    @property
    def project(self) -> str | None:
        """The project that is shown; None if all projects are shown, under the stored names."""
