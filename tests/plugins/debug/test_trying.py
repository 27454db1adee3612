"""A dry run tries a user's own functions on what was recorded."""

from __future__ import annotations

import inspect
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from lightning.algorithms import Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Batch
from lightning.batch.trajectory import Group
from lightning.losses.protocol import TokenBatch
from lightning.testing.trajectories import make_group
from lightning.trainer.summary import Reporter
from lightning.types import Task
from lightning_debug.dev import DevReport, dry_run, try_algorithm

PAIR = make_group([0.0, 1.0], group="task")


@from_loss
def plain(tokens: TokenBatch) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs


@from_loss(needs_top_logprobs=2)
def margin(tokens: TokenBatch) -> torch.Tensor:
    assert tokens.top_logprobs is not None
    return tokens.top_logprobs[:, 0] - tokens.top_logprobs[:, 1].detach()


@from_loss
def summed(tokens: TokenBatch) -> torch.Tensor:
    return (-tokens.advantages * tokens.logprobs).sum()


@from_loss
def detached(tokens: TokenBatch) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs.detach()


@from_batch
def eager(groups: Sequence[Group], *, group_size: int = 4, dynamic_sampling: bool = False) -> Batch:
    return Intake().batch([], [])


@from_batch(loss=lambda tokens: tokens.no_such_field)
def praise(groups: Sequence[Group], *, group_size: int = 4) -> Batch:
    return Intake().batch([], [])


@from_batch
def hasty(groups: Sequence[Group], *, group_size: int = 4) -> Batch:
    return _first_members(groups, count=9)


def _first_members(groups: Sequence[Group], count: int) -> Any:
    return list(map(groups[0].trajectories.__getitem__, range(count)))


@from_batch
def standardized(groups: Sequence[Group], *, group_size: int = 4) -> Batch:
    """Has no deviation for a group that one rollout is left of."""
    for group in groups:
        statistics.stdev([member.reward for member in group.trajectories])
    return Intake().batch([], [])


def broken(group: Group, advantage: Any) -> Any:
    """Needs two rollouts to find out that it is wrong."""
    return np.zeros(9)[len(group.trajectories) * 5]


def test_a_fault_in_a_users_own_function_names_it_and_its_line() -> None:
    ((problem,), hints) = try_algorithm(LightningRL(credit=broken), [PAIR])
    assert not hints
    assert problem.startswith("the algorithm lightning_rl with the credit function broken cannot make a batch of these")
    line = inspect.getsourcelines(broken)[1] + 2
    assert "IndexError: index 10 is out of bounds" in problem
    assert f"({__file__}:{line}, in broken: return np.zeros(9)[" in problem


def test_the_line_is_the_last_one_in_the_users_file() -> None:
    ((problem,), _) = try_algorithm(hasty(), [PAIR])
    assert problem.startswith("the algorithm hasty cannot make a batch")
    assert ", in _first_members: return list(map(" in problem


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (
            summed(),
            "the loss of the algorithm summed fails on two tokens, .*ConfigError: the loss summed returned a tensor",
        ),
        (detached(), "the loss of the algorithm detached fails on two tokens, .*ConfigError: it has no gradient"),
        (praise(), "the loss of the algorithm praise fails on two tokens, .*AttributeError.*no_such_field"),
    ],
)
def test_a_loss_is_called_on_two_tokens(algorithm: Any, says: str) -> None:
    ((problem,), _) = try_algorithm(algorithm, [PAIR])
    assert re.match(says, problem)


def test_a_loss_is_not_called_where_that_would_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert try_algorithm(summed(), [PAIR]) == ([], [])


@pytest.mark.parametrize(
    "algorithm", [LightningRL(), LightningRL("ppo"), plain(), plain("gspo", kl_coefficient=0.1), eager(), margin()]
)
def test_what_is_right_has_no_problem(algorithm: Any) -> None:
    assert try_algorithm(algorithm, [PAIR]) == ([], [])
    assert try_algorithm(algorithm, []) == ([], [])


def test_what_was_not_tried_is_said() -> None:
    ((), (hint,)) = try_algorithm(LightningRL(credit=broken), [make_group([1.0])])
    assert hint.endswith("was tried on single rollouts only: no two of one task succeeded")
    ((), (hint,)) = try_algorithm(plain("ppo"), [PAIR])
    assert hint.startswith("the algorithm plain was not tried: it uses a critic's values")


def test_what_fails_on_single_rollouts_only_is_a_hint() -> None:
    """A dry run has every task but the first once, and a run has it as often as the group is large."""
    single = make_group([1.0], group="other")
    ((), (hint,)) = try_algorithm(standardized(), [PAIR, single])
    assert hint.startswith("the algorithm standardized fails on a group of which only one rollout succeeded, and a run")
    assert "StatisticsError" in hint
    assert ", in standardized: statistics.stdev(" in hint
    assert try_algorithm(standardized(), [PAIR]) == ([], [])
    ((), (hint, untried)) = try_algorithm(standardized(), [single])
    assert "StatisticsError" in hint
    assert "was tried on single rollouts only" in untried
    ((problem,), ()) = try_algorithm(standardized(group_size=1), [single])
    assert "StatisticsError" in problem


async def test_a_dry_run_gives_an_own_credit_function_two_rollouts_to_compare(bench: Any, tmp_path: Path) -> None:
    seen = iter([0.0, 1.0, 2.0])

    async def agent(task: Task, llm: Any) -> float:
        await answering_once(llm)
        return next(seen)

    async def report_of(algorithm: Any, folder: str, tasks: list[Task]) -> DevReport:
        async with bench(tmp_path / folder, agent, algorithm=algorithm, runner__concurrency=1) as made:
            return await dry_run(made.loop.stack, tasks, (), algorithm, Reporter(enabled=False))

    report = await report_of(LightningRL(credit=broken), "own", [Task("one"), Task("two")])
    assert [row.task for row in report.rows] == ["one", "one", "two"]
    (problem,) = report.problems
    assert "the credit function broken cannot make a batch" in problem
    seen = iter([1.0, 1.5])
    report = await report_of(LightningRL(), "usual", [Task("one"), Task("two")])
    assert [row.task for row in report.rows] == ["one", "two"]
    assert report.ok


async def answering_once(llm: Any) -> None:
    body = {"model": llm.model, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{llm.base_url}/chat/completions", json=body) as reply,
    ):
        reply.raise_for_status()
