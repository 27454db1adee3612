"""A user's own algorithm from one function: what the decorators make, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from lightning.algorithms import Batch, Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch
from lightning.testing.trajectories import make_group
from lightning.trainer.runs import describe_algorithm


@from_loss
def reinforce(tokens: TokenBatch) -> torch.Tensor:
    """Plain REINFORCE."""
    return -tokens.advantages * tokens.logprobs


@from_batch
def winners(groups: Sequence[Group], *, group_size: int = 4, bar: float = 0.5) -> Batch:
    """Every rollout above the bar, with the advantage 1."""
    intake = Intake()
    chosen = []
    for group in groups:
        found = [member for member in intake.sound(group).trajectories if member.reward > bar]
        if not found:
            intake.skip("below_bar")
        chosen.extend(found)
    return intake.batch(chosen, [[1.0] * len(member.transitions) for member in chosen])


@from_batch(loss=lambda tokens: -tokens.logprobs)
def everyone(groups: Sequence[Group]) -> Batch:
    members = [member for group in groups for member in group.trajectories]
    return Intake().batch(members, [[1.0] * len(member.transitions) for member in members])


GROUPS = [make_group([1.0, 0.0, 0.75], group="a"), make_group([0.0, 0.5], group="b")]


def test_a_loss_is_lightning_rl_with_that_loss() -> None:
    algorithm = reinforce("rloo", group_size=4, kl_coefficient=0.1, correction="tis")
    assert isinstance(algorithm, LightningRL)
    assert (algorithm.name, algorithm.low_level, algorithm.group_size) == ("reinforce", "rloo", 4)
    usual = LightningRL("rloo", group_size=4).batch(GROUPS)
    for mine, theirs in zip(algorithm.batch(GROUPS).samples, usual.samples, strict=True):
        assert mine.advantages.tobytes() == theirs.advantages.tobytes()
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    zeros, ones = torch.zeros(2), torch.ones(2)
    batch = TokenBatch(current, current.detach(), torch.tensor([2.0, -1.0]), ones, zeros, ones.bool())
    (gradient,) = torch.autograd.grad(reinforce().loss(batch).loss, current)
    assert gradient.tolist() == [-2.0, 1.0]
    assert algorithm.loss.needs_reference  # type: ignore[attr-defined]


def test_a_loss_of_ones_own_sees_calls_without_an_advantage() -> None:
    """It may have a term that does not vanish there, as a penalty on the ratio has."""
    group = make_group([1.0, 0.5, 0.0])
    assert [rollout.index for rollout in LightningRL("rloo").batch([group]).used] == [0, 2]
    assert [rollout.index for rollout in reinforce("rloo").batch([group]).used] == [0, 1, 2]


def test_a_loss_of_ones_own_works_with_a_low_level_of_whole_calls() -> None:
    assert type(reinforce("gspo").loss) is ClippedPolicyGradient


def test_a_batch_is_an_algorithm_with_the_functions_arguments() -> None:
    algorithm = winners(bar=0.8)
    assert (algorithm.name, algorithm.group_size) == ("winners", 4)
    batch = algorithm.batch(GROUPS)
    assert [rollout.id for rollout in batch.used] == ["a/0"]
    assert batch.skipped == {"below_bar": 1}
    assert algorithm.loss == LightningRL().loss
    assert winners() == winners(bar=0.5) != algorithm
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.bar = 0.1
    with pytest.raises(ConfigError, match=r"winners has no argument 'bat'\. It takes: group_size, bar"):
        winners(bat=0.8)


def test_a_batch_may_have_a_loss_and_needs_no_arguments() -> None:
    algorithm = everyone(group_size=2)
    assert (everyone().group_size, algorithm.group_size) == (8, 2)
    assert len(algorithm.batch(GROUPS).used) == 5
    current = torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1)
    assert algorithm.loss(TokenBatch(current, one, one, one, one, one.bool())).loss.item() == 1.0


@pytest.mark.parametrize("algorithm", [reinforce("rloo", credit="decayed"), winners(bar=0.25), everyone()])
def test_a_runs_record_holds_all_of_it(algorithm) -> None:
    """So an audit makes it again, once it is registered under the function's name."""
    factory = {"reinforce": reinforce, "winners": winners, "everyone": everyone}
    described = json.loads(json.dumps(describe_algorithm(algorithm)))
    again = factory[described["name"]](**described["arguments"])
    assert again == algorithm
    assert type(again).__qualname__ == described["type"]


def test_functions_that_cannot_be_algorithms_are_refused() -> None:
    with pytest.raises(ConfigError, match="the algorithm lonely takes no groups"):

        @from_batch
        def lonely() -> Batch: ...

    with pytest.raises(ConfigError, match="the parameter 'bar' of the algorithm loose must be keyword-only"):

        @from_batch
        def loose(groups: Sequence[Group], bar: float = 0.5) -> Batch: ...

    with pytest.raises(ConfigError, match=r"the parameter 'name' .* not be called name, loss, batch"):

        @from_batch
        def named(groups: Sequence[Group], *, name: str = "x") -> Batch: ...

    with pytest.raises(ConfigError, match=r"the parameter 'bar' .* have a default"):

        @from_batch
        def open_ended(groups: Sequence[Group], *, bar: float) -> Batch: ...


def test_a_function_that_returns_something_else_is_named() -> None:
    @from_batch
    def forgetful(groups: Sequence[Group]) -> Batch:
        return None  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="the algorithm forgetful returned None: it has to return a Batch"):
        forgetful().batch(GROUPS)
