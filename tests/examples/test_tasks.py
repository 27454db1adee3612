"""The invariant: a question is either for training or for evaluation, whatever the seed."""

from __future__ import annotations

import ast
import operator
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_examples.word_problems import describe, is_held_out, make_task, tasks, val_tasks

seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_training_questions_are_never_held_out(seed: int) -> None:
    train = {str(task.input) for task in tasks(30, seed)}
    assert len(train) == 30
    assert not any(is_held_out(question) for question in train)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_never_trains_on_what_it_is_evaluated_on(seed: int) -> None:
    train = {task.input for task in tasks(4000, seed)}
    assert len(train) == 4000
    assert not train & {task.input for task in val_tasks(1000)}


def test_held_out_tasks_are_distinct_and_always_the_same() -> None:
    held_out = val_tasks(500)
    assert len({task.id for task in held_out}) == 500
    assert held_out == val_tasks(500)
    assert val_tasks(50) == held_out[:50]
    assert all(is_held_out(str(task.input)) for task in held_out)


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_a_seed_gives_the_same_tasks_and_another_seed_others(seed: int) -> None:
    assert tasks(20, seed) == tasks(20, seed)
    assert tasks(20, seed) != tasks(20, seed + 1)


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_the_answer_follows_from_the_steps_and_their_numbers_are_in_the_question(seed: int) -> None:
    task = make_task(random.Random(seed))
    value = task.metadata["start"]
    numbers = re.findall(r"\d+", str(task.input))
    assert str(value) in numbers
    for sign, number in task.metadata["steps"]:
        value = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](value, number)
        assert str(number) in numbers
    assert value == task.expected
    assert value > 0


def test_problems_have_one_to_three_steps_and_some_have_distractors() -> None:
    problems = tasks(500, seed=0)
    assert {len(task.metadata["steps"]) for task in problems} == {1, 2, 3}
    extra = [len(re.findall(r"\d+", str(task.input))) - 1 - len(task.metadata["steps"]) for task in problems]
    assert set(extra) == {0, 1}


def test_a_task_is_described_in_words() -> None:
    task = tasks(1, seed=0)[0]
    assert str(task.input) in describe(task)
    assert ast.literal_eval(describe(task).rsplit(" ", 1)[1].rstrip(")")) == task.expected
