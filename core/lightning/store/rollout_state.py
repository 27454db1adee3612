"""The rules for the states of a rollout, as pure functions that every store shares. Databases only find and keep the rows.

The invariant: an attempt ends at most once, and only the current attempt of a running rollout may write.

    pending --lease--> running --reward--------------------> succeeded
                       running --agent or timeout----------> failed
                       running --infrastructure, expired---> pending while retries are left, else failed
                       running --release-------------------> pending, the retry not spent
                       running --infrastructure, excused---> pending, the retry not spent, at most `EXCUSED` times
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning.errors import ConflictError, DataError, StaleAttemptError, StoreError
from lightning.store import codec
from lightning.store.rows import (
    CALLS,
    dump,
    extras_digest,
    finite,
    labels_to_text,
    nouns_to_text,
    pack_extras,
    plain_text,
    step_rewards_to_text,
)
from lightning.types import CallStatus, Fault, Json, Lease, Outcome, Rollout, Status, StepRecord, Transition

EXCUSED = 3
"""How often one rollout may be retried without spending an attempt. It is bounded because a rollout that crashes the policy
server each time would never end. The trainer allows this many restarts plus the rollout's `max_attempts`."""


def check_page(limit: int | None, cursor: str = "") -> None:
    """Raise `DataError` for a `limit` below 1 (None is no limit), and for a `cursor` that is neither empty nor a number."""
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} asks for an empty page: it must be at least 1")
    if cursor and not cursor.isdecimal():
        raise no_cursor(cursor)


def no_cursor(cursor: str) -> DataError:
    """Return the error for a cursor that belongs to no page of the list."""
    return DataError(f"{cursor[:80]!r} is not a cursor of this list: pass the `cursor` of the page before, or nothing")


def check_lease(worker: str, limit: int, ttl: float) -> None:
    """Raise `DataError` unless `worker`, `limit` and `ttl` can be those of a lease."""
    check_ttl(ttl)
    if limit < 0:
        raise DataError(f"limit={limit} is negative: ask for the number of rollouts you can run now")
    if not worker:
        raise DataError("a lease needs the name of its worker: release() finds leases by it")


def check_ttl(ttl: float) -> None:
    """Raise `DataError` unless `ttl` is a finite number of seconds, 0 or more."""
    if not (math.isfinite(ttl) and ttl >= 0):
        raise DataError(f"ttl={ttl!r} must be a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rollouts that a step declares to train although an earlier step trained them. Each may be in at most `limit` steps
    besides its first one."""

    rollouts: frozenset[str] = frozenset()
    limit: int = 0


REUSE: Final = "reuse"
"""The key of a step's context that declares a `Reuse`. A step without it must train only rollouts that no step trained."""


def reuse_of(record: StepRecord) -> Reuse:
    """Return the reuse that a step declares, an empty one without a declaration. Raises `DataError` for a malformed
    declaration, and for rollouts that the step does not train."""
    declared = record.context.get(REUSE)
    if declared is None:
        return Reuse()
    names = declared.get("rollouts") if isinstance(declared, Mapping) else None
    limit = declared.get("limit") if isinstance(declared, Mapping) else None
    whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names) or not whole:
        raise DataError(
            f"step {record.step} of run {record.run!r} declares a reuse that says not which rollouts (`rollouts`) and in how "
            f"many further steps they may be (`limit`): {declared!r:.200}"
        )
    reuse = Reuse(frozenset(map(str, names)), int(str(limit)))
    if others := reuse.rollouts - {name for name, _ in record.rollouts}:
        raise DataError(
            f"step {record.step} of run {record.run!r} declares rollout {min(others)!r} as reused, which it does not train"
        )
    return reuse


def check_trainable(
    record: StepRecord, rollout: str, attempt: int, run: str, status: str, fault: str, current: int
) -> None:
    """Raise `StoreError` unless the step may train an attempt of a rollout. `run`, `status`, `fault` and `current` (the newest
    attempt) are the rollout's."""
    what = f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}"
    if run != record.run:
        raise StoreError(f"{what}: it belongs to run {run!r}")
    by_the_policy = status == Status.FAILED and fault == Fault.POLICY
    if (status != Status.SUCCEEDED and not by_the_policy) or current != attempt:
        raise StaleAttemptError(f"{what} by attempt {attempt}: it is {status} at attempt {current}")


def not_new(record: StepRecord, rollout: str, trained: int | None, *, declared: bool) -> ConflictError:
    """Return the error for a rollout that the step `trained` has trained already, or that is `declared` as reused and that no
    earlier step trained."""
    what = f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}"
    if declared:
        return ConflictError(f"{what}: it is declared as reused, and no step before has trained it")
    return ConflictError(
        f"{what}: step {trained} trained it already, and a rollout enters exactly one step unless its reuse is declared "
        "(Trainer.session with trainer.max_reuse)"
    )


def committed_otherwise(record: StepRecord, digest: str) -> ConflictError:
    """Return the error for a step that is committed already with a batch of another `digest`."""
    return ConflictError(
        f"step {record.step} of run {record.run!r} is committed already with another batch (digest {digest!r}, "
        f"not {record.digest!r}): is another trainer working on this run?"
    )


def used_up(record: StepRecord, rollout: str, steps: int, limit: int) -> ConflictError:
    """Return the error for a rollout that was in `steps` steps and may be in no other one."""
    return ConflictError(
        f"step {record.step} of run {record.run!r} cannot train rollout {rollout!r}: it was in {steps} steps already, and "
        f"trainer.max_reuse = {limit} lets it be in {limit} beyond its first"
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """A checked outcome as database values. `digest` tells a repeated outcome of an attempt from another one."""

    reward: float | None
    fault: str
    standing: tuple[float | None, str, str, str, float]
    """Reward, rewards, fault, error and seconds: the columns of the rollout."""
    kept: tuple[str, str, str, str, bytes | None]
    """Tool events, step rewards, labels, step states and extras: the columns of the attempt."""
    digest: str


@dataclass(frozen=True, slots=True)
class Position:
    """The state of a rollout. `attempt` is its newest attempt, the fencing token; `spent` attempts count against
    `max_attempts`."""

    rollout: str
    status: Status
    attempt: int
    spent: int
    max_attempts: int


def ending(rollout: str, outcome: Outcome) -> Ending:
    """Check an outcome and return it as database values. Raises `DataError` unless exactly one of reward and fault is set and
    every number is finite, and for extras that `rows.pack_extras` refuses."""
    if (outcome.reward is None) == (outcome.fault is None):
        raise DataError(f"the outcome of rollout {rollout!r} must have a reward or a fault, not both and not neither")
    reward = None if outcome.reward is None else finite(outcome.reward, f"the reward of rollout {rollout!r}")
    rewards = {
        name: finite(value, f"reward {name!r} of rollout {rollout!r}") for name, value in outcome.rewards.items()
    }
    fault = "" if outcome.fault is None else Fault(outcome.fault).value
    standing = (
        reward,
        dump(rewards),
        fault,
        plain_text(outcome.error),
        finite(outcome.seconds, f"the duration of rollout {rollout!r}"),
    )
    texts = (
        nouns_to_text(outcome.tool_events, "a tool event"),
        step_rewards_to_text(outcome.step_rewards),
        labels_to_text(outcome.labels, outcome.untrained),
        nouns_to_text(outcome.step_states, "a state"),
    )
    packed = pack_extras(outcome.extras, f"the extras of the outcome of rollout {rollout!r}")
    said = json.dumps([*standing, *texts, extras_digest(packed)])
    return Ending(reward, fault, standing, (*texts, packed), hashlib.sha256(said.encode()).hexdigest())


def after(position: Position, end: Ending) -> Status:
    """Return the status of a rollout after its running attempt ends with `end`."""
    if end.reward is not None:
        return Status.SUCCEEDED
    if end.fault == Fault.INFRASTRUCTURE and position.spent < position.max_attempts:
        return Status.PENDING
    return Status.CANCELLED if end.fault == Fault.CANCELLED else Status.FAILED


def is_excused(position: Position, end: Ending, *, spend: bool) -> bool:
    """Return whether an attempt that ends with `end` is given back without being spent. Released attempts count against
    `EXCUSED`, too."""
    given_back = position.attempt - position.spent
    return not spend and end.fault == Fault.INFRASTRUCTURE and given_back < EXCUSED


def may_write(position: Position, attempt: int) -> bool:
    """Return whether `attempt` is the rollout's running attempt."""
    return attempt == position.attempt and position.status is Status.RUNNING


def check_fence(position: Position, attempt: int) -> None:
    """Raise `StaleAttemptError` unless `attempt` is the rollout's running attempt."""
    if may_write(position, attempt):
        return
    if attempt < position.attempt:
        why = f"attempt {position.attempt} has taken its place"
    elif attempt > position.attempt:
        why = f"it has not begun, the latest attempt is {position.attempt}"
    else:
        why = f"it has ended, the rollout is {position.status.value}"
    raise StaleAttemptError(
        f"attempt {attempt} of rollout {position.rollout!r} may not write: {why}. Drop this work; nothing was changed"
    )


def answered(transition: Transition) -> list[Transition]:
    """Return the forms in which an aborted call may have been stored when it seemed answered; none for a call of another
    status."""
    if transition.status is not CallStatus.ABORTED:
        return []
    return [replace(transition, status=status) for status in CallStatus if status.answered]


def settled(transitions: Sequence[Transition]) -> tuple[Transition, ...]:
    """Return the calls of one append. A call that is in it as answered, and later as aborted but otherwise equal, is aborted in
    both places. So repeating the append repeats the same calls."""
    found, aborted = list(transitions), dict[tuple[str, int, int], Transition]()
    for at in reversed(range(len(found))):  # a later call with the same key says whether the answer arrived
        call = found[at]
        if call.status is CallStatus.ABORTED:
            aborted[call.key] = call
        elif (
            call.status.answered
            and (later := aborted.get(call.key)) is not None
            and replace(call, status=CallStatus.ABORTED) == later
        ):
            found[at] = later
    return tuple(found)


def known_as(once: str, method: str, *arguments: Json) -> str:
    """Return the name under which a database keeps the answer of a call; empty if its caller gave no `once`.

    The name has a fixed length. It depends on `once`, the method and the arguments, and does not reveal them.
    """
    if not once:
        return ""
    text = json.dumps([once, method, *arguments], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def unknown_rollout(rollout: str) -> StoreError:
    """Return the error for a rollout that does not exist."""
    return StoreError(f"rollout {rollout!r} is unknown: create it with create_rollouts() first")


def created_elsewhere(rollout: Rollout) -> ConflictError:
    """Return the error for a new rollout whose id a rollout of another run has."""
    return ConflictError(
        f"rollout {rollout.id!r} cannot be created in run {rollout.run!r}: another run has one with this id. "
        "Begin the ids of rollouts with the id of their run"
    )


def not_holder(lease: Lease, worker: str) -> StaleAttemptError:
    """Return the error for renewing a lease that another `worker` has."""
    return StaleAttemptError(
        f"attempt {lease.attempt} of rollout {lease.rollout.id!r} is leased by {worker!r}, not by {lease.worker!r}"
    )


def stored_otherwise(transition: Transition) -> ConflictError:
    """Return the error for a call whose key is stored with other content."""
    return ConflictError(
        f"transition {transition.key} is stored already with other content: give each call of an attempt its own seq "
        "(next_seq() says the first unused one)"
    )


def record_digest(transition: Transition, content: bytes) -> bytes:
    """Return the `row_digest` of a transition; `content` is the codec's digest of its token arrays. Transitions with equal
    digests are equal for the store."""
    return row_digest(transition.rollout, transition.attempt, CALLS.values(transition), content)


def row_digest(rollout: str, attempt: int, row: Sequence[Any], content: bytes) -> bytes:
    """Return the BLAKE2b-64 over every field of a transition. `row` has the values of `rows.CALLS`, `content` is the codec's
    digest of the token arrays. Raises `DataError` or `TypeError` for a row with values of wrong types."""
    *described, packed = row
    whole = b"".join((dump([rollout, attempt, *described]).encode(), content, packed or b""))
    return hashlib.blake2b(whole, digest_size=codec.DIGEST_BYTES).digest()
