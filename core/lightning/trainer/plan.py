"""Which rollouts a step needs: a pure function of the settings, so that a resumed run plans exactly what it planned before.

Where a plugin brings the order (`lightning.trainer.samplers`) the tasks are a function of the committed steps, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.errors import DataError
from lightning.types import Fault, Json, Rollout, Status, Task

if TYPE_CHECKING:
    from lightning.config.sections import FixedOrder
    from lightning.trainer.context import Epoch

TRAIN, VAL = "train", "val"
T = TypeVar("T")
_GENERATION = re.compile(r"~(\d+)/\d+$")
_FIELDS = frozenset(field.name for field in fields(Task))
_ROW = (
    ". A mapping with `input` and other fields of a task is read as a task; if the mapping is itself an input, write "
    "lightning.Task(input={...})"
)


def as_tasks(items: Sequence[Task | Json], what: str) -> list[Task]:
    """Wrap bare inputs into tasks and give repeated ids a suffix, in order, so that each position has its own id.

    A mapping with `input` and other fields of a task, and with nothing else (a row of a file of tasks), becomes that task.
    Raises `DataError` for a text, a path or a mapping in place of a list of tasks, and for an item that cannot be a task.
    """
    _check_list(items, what)
    tasks = [_as_task(item, f"{what}[{position}]") for position, item in enumerate(items)]
    taken: set[str] = set()
    for position, task in enumerate(tasks):
        name, copies = task.id, 1
        while name in taken:
            copies += 1
            name = f"{task.id}.{copies}"
        taken.add(name)
        if name != task.id:
            tasks[position] = Task(task.input, task.expected, task.metadata, name)
    return tasks


def _check_list(items: object, what: str) -> None:
    if isinstance(items, (str, bytes, PurePath)):
        raise DataError(
            f"{what} is {items!r:.200}, not a list of tasks: give lightning.Task objects or bare inputs; a file of JSON lines "
            f"is {what}=[json.loads(line) for line in open(path)]"
        )
    if isinstance(items, Mapping):
        raise DataError(
            f"{what} must be a list of tasks, not a mapping (the first of its keys are {sorted(map(str, items))[:5]}): give "
            f"{what}=[lightning.Task(...), ...], with one lightning.Task for each task"
        )


def _as_task(item: Task | Json, where: str) -> Task:
    try:
        task = item if isinstance(item, Task) else Task(**_row(item) or {"input": item})
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}{_ROW if isinstance(item, Mapping) else ''}") from error
    if not isinstance(task.id, str) or "/" in task.id:
        hint = _ROW if isinstance(item, Mapping) else ""
        raise DataError(f"{where}: a task id must be a string without '/', not {task.id!r}{hint}")
    return task


def _row(item: Json) -> dict[str, Any]:
    """Return the fields of a task in a row of a file of tasks, without fields that are null, except `input`; empty for any
    other input."""
    if not isinstance(item, Mapping) or "input" not in item or len(item) == 1 or not _FIELDS.issuperset(item):
        return {}
    return {name: value for name, value in item.items() if value is not None or name == "input"}


@dataclass(frozen=True, slots=True)
class Place:
    """A place in endless passes over tasks: in pass `over`, behind the task whose place in the order is `key`."""

    over: int = 0
    key: bytes = b""


START = Place()


def fixed_order(order: str) -> FixedOrder | None:
    """Return an order that needs no plugin; None for any other order."""
    return "given" if order == "given" else "shuffled" if order == "shuffled" else None


def tasks_of_step(
    tasks: Sequence[Task], earlier: int, count: int, seed: int, order: FixedOrder = "shuffled", begin: Place = START
) -> list[Task]:
    """Return the `count` tasks of a step: consecutive slices of endless passes over `tasks`, so that steps need no state
    between them. `earlier` is the number of steps taken since the place `begin`."""
    return tasks_from(tasks, earlier * count, count, seed, order, begin)


def tasks_from(
    tasks: Sequence[Task],
    first: int,
    count: int,
    seed: int | str,
    order: FixedOrder = "shuffled",
    begin: Place = START,
) -> list[Task]:
    """Return `count` tasks of endless passes over `tasks`, from position `first` behind `begin` on. With the order `shuffled`
    each pass is shuffled by itself; with `given` every pass is in the given order. `shuffled` sorts by hashes of seed, pass and
    task, so that adding a task moves no other task."""
    if not tasks:
        raise DataError("the list of training tasks is empty: give fit() at least one task in `train`")
    names = tuple(task.id for task in tasks)
    return [tasks[index] for _, index in _taken(names, first, count, str(seed), order, begin)]


def units_from(
    units: Sequence[T], names: Sequence[str], first: int, count: int, seed: int, order: FixedOrder = "shuffled"
) -> list[T]:
    """Return units as `tasks_from` returns tasks. `names` are the names of the units, each different."""
    return [units[index] for _, index in _taken(tuple(names), first, count, str(seed), order, START)]


def place_after(epochs: Sequence[Epoch], taken: Sequence[int], tasks: Sequence[Task]) -> Place:
    """Return the place at which the passes of the last of these config epochs begin. `taken` has the number of tasks that each
    earlier epoch took; `tasks` are the tasks of an epoch that does not name its own.

    No pass takes a task twice, whatever tasks were added or taken away. A task that was added comes in the present pass if its
    turn is still to come. If the seed or the order changed, the next pass begins.
    """
    place = START
    for (before, after), count in zip(pairwise(epochs), taken, strict=True):
        names, seed, order = _listed(before)
        if count and (fixed := fixed_order(order)):
            names = names or tuple(task.id for task in tasks)
            ((place, _),) = _taken(names, count - 1, 1, seed, fixed, place)
        if _listed(after)[1:] != (seed, order):
            place = Place(place.over + 1)
    return place


def task_ids(epoch: Epoch) -> tuple[str, ...]:
    """Return the ids of the training tasks of a config epoch, in the order in which they were given."""
    tasks = epoch.config.get("tasks")
    found = tasks.get("train") if isinstance(tasks, Mapping) else None
    return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()


def order_digest(epoch: Epoch) -> str:
    """Return a digest of the tasks, the seed and the order of a config epoch. Two epochs with the same digest take their tasks
    in the same order."""
    return hashlib.blake2b(json.dumps(_listed(epoch)).encode(), digest_size=16).hexdigest()


def _listed(epoch: Epoch) -> tuple[tuple[str, ...], str, str]:
    """Return the tasks, the seed and the order of a config epoch."""
    order = epoch.setting("trainer", "order")
    return task_ids(epoch), str(epoch.setting("trainer", "seed")), order if isinstance(order, str) else "shuffled"


def _taken(
    names: tuple[str, ...], first: int, count: int, seed: str, order: FixedOrder, begin: Place
) -> list[tuple[Place, int]]:
    """Return, for each of `count` tasks from position `first` behind `begin` on, the place behind the task and the task's
    index."""
    rest = [entry for entry in _order(names, f"{seed}/{begin.over}", order) if entry[0] > begin.key]
    found = []
    for position in range(first, first + count):
        over, entries, offset = begin.over, rest, position
        if position >= len(rest):
            more, offset = divmod(position - len(rest), len(names))
            over += 1 + more
            entries = _order(names, f"{seed}/{over}", order)
        key, index = entries[offset]
        found.append((Place(over, key), index))
    return found


@functools.lru_cache(maxsize=8)
def _order(names: tuple[str, ...], seed: str, order: FixedOrder) -> list[tuple[bytes, int]]:
    """Return the tasks of a pass in their order, each as its key and its index."""
    if order == "given":
        return [(index.to_bytes(8), index) for index in range(len(names))]
    keyed = (
        (hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), index) for index, name in enumerate(names)
    )
    return sorted(keyed)


def tasks_of_wave(
    tasks: Sequence[Task],
    earlier: int,
    wave: int,
    count: int,
    seed: int,
    order: FixedOrder = "shuffled",
    begin: Place = START,
) -> list[Task]:
    """Return the tasks of one wave of a step. Wave 0 has the step's own tasks. Later waves are passes over the other tasks:
    shuffled, or with the order `given` from the task behind the step's last task on (in a curriculum these are the nearest).

    Later waves do not change the tasks of other steps.
    """
    own = tasks_of_step(tasks, earlier, count, seed, order, begin)
    if wave == 0:
        return own
    used = {task.id for task in own}
    following = tasks.index(own[-1]) + 1 if order == "given" else 0
    others = [task for task in (*tasks[following:], *tasks[:following]) if task.id not in used]
    return tasks_from(others or tasks, (wave - 1) * count, count, f"{seed}/waves of {earlier}", order)


def generation(rollouts: Sequence[Rollout], planned: Sequence[Rollout], later: Sequence[Rollout] = ()) -> int:
    """Return the number of the try at a step (or evaluation) that is to go on: 0, or more if a try was lost as a whole or was
    planned with other settings. `rollouts` are those of the step so far, `planned` is the plan of a first try, and `later` are
    rollouts that may follow in it.

    A try that failed as a whole (the agent's database was down) is not the end of a run: a resume plans the step again, under
    new ids. A resume also plans the step again if it plans other tasks, another number of rollouts for each task, or rollouts
    that begin elsewhere.
    """
    newest = newest_generation(rollouts)
    every = of_generation(rollouts, newest)
    meant = {_place_of(rollout): (rollout.task.id, rollout.parent) for rollout in (*planned, *later)}
    # Branches at other places follow from the planned rollouts.
    mine = [rollout for rollout in every if rollout.parent is None or _place_of(rollout) in meant]
    other = any(meant.get(_place_of(rollout)) != (rollout.task.id, rollout.parent) for rollout in mine)
    return newest + (other or (len(mine) == len(planned) and is_lost(mine)))


def _place_of(rollout: Rollout) -> tuple[str, int]:
    """Return a rollout's place in its step, in any try: its group's number, and its own index in the group."""
    return rollout.group.rpartition("/")[2], rollout.index


def is_lost(rollouts: Sequence[Rollout]) -> bool:
    """Whether nothing can be learned from these rollouts, so that they must be planned again: every training rollout failed
    or was cancelled, and none failed by the policy's own fault.

    A held-out evaluation is lost only if the infrastructure failed every rollout. An agent that fails every task is a result.
    """
    return all(
        rollout.status in (Status.FAILED, Status.CANCELLED)
        and (rollout.fault is not Fault.POLICY if rollout.split == TRAIN else rollout.fault is Fault.INFRASTRUCTURE)
        for rollout in rollouts
    )


def newest_generation(rollouts: Sequence[Rollout]) -> int:
    """Return the number of the newest try among the rollouts."""
    return max((_generation_of(rollout) for rollout in rollouts), default=0)


def of_generation(rollouts: Sequence[Rollout], number: int) -> list[Rollout]:
    """Return the rollouts of the try with this number."""
    return [rollout for rollout in rollouts if _generation_of(rollout) == number]


def _generation_of(rollout: Rollout) -> int:
    match = _GENERATION.search(rollout.group)
    return int(match.group(1)) if match else 0


def _prefix(*parts: str | int, generation: int) -> str:
    return "/".join(map(str, parts)) + (f"~{generation}" if generation else "")


def train_rollouts(
    run: str,
    step: int,
    tasks: Sequence[Task],
    group_size: int,
    max_attempts: int,
    *,
    generation: int = 0,
    first: int = 0,
) -> list[Rollout]:
    """Return `group_size` rollouts for each task of a step. Their ids are the same each time, so creating the rollouts twice is
    harmless.

    Groups are numbered within the step, from `first` on.
    """
    prefix = _prefix(run, step, generation=generation)
    return [
        Rollout(
            id=f"{prefix}/{place}/{index}",
            run=run,
            task=task,
            group=f"{prefix}/{place}",
            step=step,
            split=TRAIN,
            index=index,
            max_attempts=max_attempts,
        )
        for place, task in enumerate(tasks, first)
        for index in range(group_size)
    ]


def val_rollouts(
    run: str, step: int, tasks: Sequence[Task], max_attempts: int, *, generation: int = 0
) -> list[Rollout]:
    """Return one rollout for each held-out task, evaluated with the policy that `step` optimizer steps produced."""
    prefix = _prefix(run, VAL, step, generation=generation)
    return [
        Rollout(
            id=f"{prefix}/{place}",
            run=run,
            task=task,
            group=f"{prefix}/{place}",
            step=step,
            split=VAL,
            index=0,
            max_attempts=max_attempts,
        )
        for place, task in enumerate(tasks)
    ]
