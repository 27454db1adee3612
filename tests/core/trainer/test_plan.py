"""Planning is a pure function of the seed, and covers every task equally."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.trainer.context import Epoch
from lightning.trainer.plan import (
    Place,
    as_tasks,
    place_after,
    tasks_of_step,
    tasks_of_wave,
    train_rollouts,
    val_rollouts,
)
from lightning.trainer.trainer import warn_of_tasks
from lightning.types import Task

TASKS = [Task(f"question {number}") for number in range(7)]
TASKS20 = [Task(f"question {number}") for number in range(20)]


@given(step=st.integers(0, 50), count=st.integers(1, 20), seed=st.integers(0, 5))
def test_a_step_is_planned_the_same_every_time(step: int, count: int, seed: int) -> None:
    assert tasks_of_step(TASKS, step, count, seed) == tasks_of_step(TASKS, step, count, seed)


@given(count=st.integers(1, 20), passes=st.integers(1, 5), seed=st.integers(0, 5))
def test_whole_passes_use_every_task_equally_often(count: int, passes: int, seed: int) -> None:
    steps = len(TASKS) * passes  # count * steps is a multiple of the number of tasks
    used = Counter(task.id for step in range(steps) for task in tasks_of_step(TASKS, step, count, seed))
    assert set(used.values()) == {count * passes}
    assert len(used) == len(TASKS)


def test_seeds_give_different_orders() -> None:
    assert tasks_of_step(TASKS, 0, 7, 0) != tasks_of_step(TASKS, 0, 7, 1)


def _epoch(number: int, first: int, tasks: list[Task], count: int, **settings: Any) -> Epoch:
    trainer = {"tasks_per_step": count, "seed": 0, "order": "shuffled", **settings}
    return Epoch(number, first, {"tasks": {"train": [task.id for task in tasks]}, "config": {"trainer": trainer}})


@given(
    size=st.integers(1, 20),
    steps=st.integers(1, 12),
    count=st.integers(1, 5),
    then=st.integers(1, 5),
    order=st.sampled_from(["shuffled", "given"]),
    data=st.data(),
)
def test_other_tasks_train_none_of_the_old_ones_twice_or_never(
    size: int, steps: int, count: int, then: int, order: Any, data: Any
) -> None:
    """As given that is so for tasks that are put behind the others."""
    old, more = TASKS20[:size], [Task(f"new {number}") for number in range(data.draw(st.integers(0, 5)))]
    new = [*old, *more]
    if order == "shuffled":
        gone = data.draw(st.sets(st.sampled_from(range(size)), max_size=size - 1))
        new = data.draw(st.permutations([task for task in new if task not in [old[place] for place in gone]]))
    before = [task.id for step in range(steps) for task in tasks_of_step(old, step, count, 0, order)]
    epochs = [_epoch(0, 0, old, count, order=order), _epoch(1, steps, new, then, order=order)]
    begin = place_after(epochs, [steps * count], new)
    after = [task.id for step in range(2 * len(new)) for task in tasks_of_step(new, step, then, 0, order, begin)]
    in_pass = set(before[begin.over * size :])
    left, whole = {task.id for task in old if task in new} - in_pass, [task.id for task in new]
    rest = next(
        n for n in range(len(new) + 1) if sorted(after[n : n + len(new)]) == sorted(whole) and left <= {*after[:n]}
    )
    assert len(after[:rest]) == len({*after[:rest]}), "none comes twice in the rest of the pass"
    assert in_pass.isdisjoint(after[:rest]), "nor one that it has taken"
    assert left <= {*after[:rest]} <= left | {task.id for task in more}


def test_one_more_of_a_thousand_at_half_a_pass() -> None:
    old = [Task(f"question {number}") for number in range(1000)]
    new = [*old, Task("one more")]
    begin = place_after([_epoch(0, 0, old, 8), _epoch(1, 63, new, 16)], [63 * 8], new)
    taken = [task.id for step in range(63) for task in tasks_of_step(old, step, 8, 0)]
    taken += [task.id for step in range(31) for task in tasks_of_step(new, step, 16, 0, begin=begin)]
    counts = Counter(taken)
    assert sum(counts[task.id] for task in old) in (999, 1000)
    assert max(counts.values()) == 1


def test_the_tasks_keep_their_order_where_one_is_added() -> None:
    more = [TASKS[0], Task("one more"), *TASKS[1:]]
    kept = [task for task in tasks_of_step(more, 0, 8, 3) if task in TASKS]
    assert kept == tasks_of_step(TASKS, 0, 7, 3)


@pytest.mark.parametrize("order", ["shuffled", "given"])
def test_a_run_that_goes_on_with_other_tasks_says_so(order: str, caplog: pytest.LogCaptureFixture) -> None:
    before = _epoch(0, 0, TASKS, 2, order=order)
    warn_of_tasks(before, _epoch(1, 3, TASKS, 4, order=order))
    assert not caplog.text
    warn_of_tasks(before, _epoch(1, 3, [*TASKS[1:], Task("one"), Task("two")], 2, order=order))
    assert "the training tasks changed: 2 added, 1 removed; " in caplog.text
    assert ("comes no second time in it" in caplog.text) == (order == "shuffled")
    warn_of_tasks(before, _epoch(1, 3, TASKS[::-1], 2, order=order))
    assert ("0 added, 0 removed, and they stand in another order" in caplog.text) == (order == "given")


def test_another_seed_begins_the_next_pass() -> None:
    begin = place_after([_epoch(0, 0, TASKS, 2), _epoch(1, 1, TASKS, 2, seed=1)], [2], TASKS)
    assert begin == Place(1)
    assert place_after([_epoch(0, 0, TASKS, 2), _epoch(1, 3, TASKS, 2, order="given")], [6], []) == Place(1)


def test_the_given_order_is_that_of_every_pass_whatever_the_seed() -> None:
    for seed in range(2):
        steps = [task for step in range(7) for task in tasks_of_step(TASKS, step, 2, seed, "given")]
        assert steps == [*TASKS, *TASKS]


def test_waves_of_the_given_order_go_on_with_the_tasks_that_follow_the_step() -> None:
    assert tasks_of_wave(TASKS, 1, 0, 2, 0, "given") == TASKS[2:4]
    assert [tasks_of_wave(TASKS, 1, wave, 2, 0, "given") for wave in (1, 2)] == [TASKS[4:6], [TASKS[6], TASKS[0]]]
    assert tasks_of_wave(TASKS, 3, 0, 2, 0, "given") == [TASKS[6], TASKS[0]], "a step may cross the end of a pass"
    assert tasks_of_wave(TASKS, 3, 1, 2, 0, "given") == TASKS[1:3]
    assert tasks_of_wave(TASKS[:2], 0, 1, 2, 0, "given") == TASKS[:2], "with no other tasks there are the step's own"


def test_an_empty_task_list_is_named() -> None:
    with pytest.raises(DataError, match="list of training tasks is empty"):
        tasks_of_step([], 0, 4, 0)


def test_rollouts_of_a_step_have_stable_ids_and_whole_groups() -> None:
    planned = train_rollouts("run", 3, TASKS[:2], 4, 2)
    assert planned == train_rollouts("run", 3, TASKS[:2], 4, 2)
    assert len({rollout.id for rollout in planned}) == 8
    assert Counter(rollout.group for rollout in planned) == {"run/3/0": 4, "run/3/1": 4}
    assert {rollout.split for rollout in planned} == {"train"}


def test_held_out_rollouts_are_one_for_each_task() -> None:
    planned = val_rollouts("run", 10, TASKS, 2)
    assert [rollout.task for rollout in planned] == TASKS
    assert {rollout.split for rollout in planned} == {"val"}


def test_bare_inputs_become_tasks_and_repeated_ones_get_their_own_ids() -> None:
    tasks = as_tasks(["a", {"q": 1}, "a", Task("b", id="mine")], "train")
    assert len({task.id for task in tasks}) == 4
    assert tasks[2].input == "a"
    assert tasks[3].id == "mine"


def test_rows_of_a_file_of_tasks_are_tasks() -> None:
    rows = [
        '{"input": "q", "expected": "a", "id": "mine", "metadata": {"level": 1}}',
        '{"input": null, "expected": null}',
    ]
    (first, second) = as_tasks([json.loads(row) for row in rows], "train")
    assert first == Task("q", "a", {"level": 1}, "mine")
    assert second == Task(None)
    for other in ({"input": "q", "context": "c"}, {"question": "q", "expected": "a"}, {"input": "q"}):
        assert as_tasks([other], "train")[0].input == other


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "train.jsonl",
            r"train is 'train.jsonl', not a list of tasks: .*train=\[json\.loads\(line\) for line in open\(path\)\]",
        ),
        (b"train.jsonl", "train is b'train.jsonl', not a list"),
        (Path("train.jsonl"), r"train is \w+Path\('train.jsonl'\), not a list"),
        (
            {"input": "q", "expected": "a"},
            r"train must be a list of tasks, not a mapping .* \['expected', 'input'\]\): give train=\[lightning\.Task",
        ),
    ],
)
def test_what_is_no_list_of_tasks_is_refused_with_the_cure(given: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        as_tasks(given, "train")  # type: ignore[arg-type]


def test_an_id_with_a_slash_is_refused() -> None:
    with pytest.raises(DataError, match=r"train\[0\]"):
        as_tasks([Task("x", id="a/b")], "train")
