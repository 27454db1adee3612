"""What every store must do, whatever database is behind it.

The invariant: everything acknowledged is durable, work is delivered at least once and takes effect exactly once.
`(rollout, attempt)` fences late writers, `(rollout, attempt, seq)` makes appends idempotent. Methods may be awaited
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
"""The key of a run's state that says that calls were removed: `at` (Unix seconds), `rollouts` (how many lost theirs), `trained`
(whether some of them had been trained)."""

TRACES_RUN: Final = "gateway/traces"
"""Where in the state gateways keep the traces of attempts: `[rollout, attempt, expires_at]` by trace. No run has this id, since
it would be a folder's name."""

KNOWN_SECONDS: Final = 3600.0
"""For how long a store knows the answer to a call that was named by its caller (`once`)."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and the cursor of the next page; an empty one says that this was the last."""

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
    """What an attempt was completed with, beside its reward. `attempt` is its number; one that did not end has nothing."""

    rollout: str
    attempt: int
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    step_states: tuple[StepState, ...] = ()
    extras: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutCount:
    """How many rollouts of a run have this split and this status."""

    split: str
    status: Status
    rollouts: int


class RunWatch(Protocol):
    """Hears of the changes of a run: rollouts created, ended or given back, steps, state. A lease is none, nor are the calls
    of an attempt: whoever waits for work or for outcomes would wake for nothing."""

    async def wait(self, timeout: float) -> bool:
        """Return True as soon as something may have changed since the last call (the first time: since the watch began),
        False after `timeout` seconds without a change. It may be mistaken about a change, never miss one."""


class Store(Protocol):
    """The one source of truth. Every method raises `StoreError` (or a subclass) when the database refuses.

    A method may be called again when its answer was lost. Where that would not be the same as calling it once, it takes `once`:
    an id that the caller made for this very call, of any form that nobody else makes. For `KNOWN_SECONDS` the same call under
    the same id changes nothing more and is answered as it was; with other arguments it is another call.
    """

    async def open(self, *, make: bool = True) -> None:
        """Connect, and make the tables of a new database. Idempotent.

        Raises `SchemaError` for a corrupt or another schema. Where there is no store it makes one, unless `make` is false: then
        it raises `ConfigError` or `SchemaError`.
        """

    async def close(self) -> None:
        """Flush what was acknowledged and disconnect. Idempotent."""

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do one operation, of the table or of a plugin's, with all of its arguments by name. Raises `StoreError` for one of a
        plugin that this store, or the server behind it, has no part for.

        It is asked through the operation, which knows the types: `await put_note(store, note)`.
        """

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """Create the run, or return the stored one when the id exists (its config is not changed)."""

    async def get_run(self, run: str) -> Run | None:
        """The run, or None when nobody created it."""

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """All runs, or those of a project, newest first: at most `limit` of those behind the run `after`. If `brief`, each with
        an empty `config`: whoever only wants their names need not read what may list all tasks.

        Raises `DataError` for a limit below 1, and where `after` is none of those runs.
        """

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """Hear of what other processes and other tasks change in a run; `run=""` hears of the state that belongs to none.

        Enter it, look at what is to be known, then wait: no change between the look and the wait is lost.
        """

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """Insert those whose id is new; return how many were. Calling again with the same ids changes nothing.

        Raises `ConflictError`, and inserts none, when another run has a rollout with one of the ids.
        """

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """The rollout as it stands, or None when nobody created it."""

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
        """Rollouts of a run in creation order, filtered; `cursor` continues where a page ended."""

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """How many rollouts of a run there are, by split and status; those that are none are left out."""

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """Take up to `limit` pending rollouts (creation order), or running ones whose lease expired, as a new attempt.

        A rollout whose lease expired on its last allowed attempt becomes failed (`Fault.INFRASTRUCTURE`) instead; with a
        `limit` of 0, and no id, that is all that happens.
        Clocks are the database's; `ttl` is in seconds. The same call again (`once`, whatever its `limit`), while its leases
        last, gives those of them that nobody else has taken since, for another `ttl` seconds; with a `limit` of 0 that is all
        that it does.
        """

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """Prolong a lease. Raises `StaleAttemptError` when the attempt was superseded or has ended."""

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """End an attempt, with its tool events, step rewards, labels and extras, atomically.

        A reward makes the rollout succeeded. `Fault.INFRASTRUCTURE` makes it pending again while attempts are left, without
        `spend` also when none is: the attempt is then given back as by `release`, up to `rules.EXCUSED` times. Other faults
        make it failed. Repeating the same call returns the same rollout; a different outcome for an ended
        attempt, or a superseded attempt, raises `StaleAttemptError`. A NaN or infinite reward raises `DataError`, and so do
        extras that `lightning.store.rows` refuses.

        `outcome.labels` become the callers of the attempt's transitions with these ids; an id that none has is ignored.
        """

    async def release(self, worker: str, *, once: str = "") -> int:
        """Return every rollout leased by `worker` to pending without spending the attempt's retry; return how many.

        Used when a runner restarts or drains. The attempt number still advances at the next lease, so that late
        writers of the released attempt are fenced.
        """

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """Store calls durably before returning; return how many were new.

        The same key with the same content is a no-op; with different content `ConflictError`. The caller of a call that
        was labelled since is not part of its content. A call that was answered and comes again as aborted, the same
        otherwise, is aborted from then on: its answer did not arrive. An attempt that was superseded or has ended raises
        `StaleAttemptError`; an unknown rollout raises `StoreError`, extras that `lightning.store.rows` refuses `DataError`.
        """

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """The first unused `seq` of an attempt (0 for a new one)."""

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """The calls of an attempt (default: the rollout's current one) in `seq` order."""

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """`transitions` for many `(rollout, attempt)` at once, in the order asked for."""

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """What many `(rollout, attempt)` were completed with, in the order asked for. None names a rollout's current attempt.

        Raises `StoreError` for an unknown rollout.
        """

    # steps and metrics ------------------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """Record an optimizer step and mark its rollouts trained, atomically.

        Raises `ConflictError` when the step exists with another digest, or one of the rollouts was trained already by another
        step and its reuse is not declared, or in more steps than that allows (`rollout_state.reuse_of`);
        `StaleAttemptError` when a rollout's succeeded attempt is not the one named, `DataError` for extras that
        `lightning.store.rows` refuses. Repeating is a no-op.
        """

    async def steps(
        self, run: str, *, after: int = 0, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """Committed steps in order: at most `limit` of those with a larger number than `after`. If `brief`, each without
        `rollouts`, `digests`, `groups` and `extras`, which are most of a step: 40 KB of 512 rollouts.

        Raises `DataError` for a limit below 1.
        """

    async def last_step(self, run: str) -> StepRecord | None:
        """The committed step with the largest number, or None when there is none."""

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """Merge values into the metrics of a step."""

    async def metrics(self, run: str) -> list[MetricPoint]:
        """The metrics of a run by step."""

    # small state ------------------------------------------------------------------------------------------------
    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """Keep a small JSON value for a run (for example the gateway's signing secret), replacing an older one.

        `once=None` says that nobody else writes the key meanwhile: the call may be done twice, and no store need know it by a
        name.
        """

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """Keep a value unless the key has one; return the one that is kept. So several processes agree on one."""

    async def get_state(self, run: str, key: str) -> Json:
        """The value kept under a key, or None."""

    # resources -----------------------------------------------------------------------------------


@runtime_checkable
class ShowsProject(Protocol):
    """A store that may show one project alone, with that project's own names."""

    @property
    def project(self) -> str | None:
        """The project that is shown; None: all, with names as they are stored."""
