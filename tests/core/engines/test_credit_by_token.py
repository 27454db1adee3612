"""Credit by token: an advantage for each token of an answer has exactly its own gradient, and obeys what holds for numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS, LowLevel
from lightning.batch import Advantages, Group, build_samples
from lightning.credit import Credit, GroupAdvantage, identical
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import DataError
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.training_data import batch_digest

# the second call goes on from the first, so both share a row; the third has a prompt of its own
CALLS = [((1, 2, 3), (4, 5, 6)), ((1, 2, 3, 4, 5, 6, 9), (7, 8)), ((20, 21), (22, 23, 24, 25))]


def group_of(*rewards: float) -> Group:
    """A group of rollouts of three calls, whose sampler gave no logprobs."""
    members = []
    for index, reward in enumerate(rewards):
        made = make_trajectory(CALLS[: 3 - index % 2], rollout=f"g/{index}", group="g", index=index, reward=reward)
        calls = tuple(replace(call, logprobs=memoryview(b"").cast("f")) for call in made.transitions)
        members.append(replace(made, transitions=calls))
    return Group("g", tuple(members))


def falling(group: Group, advantage: GroupAdvantage) -> Advantages:
    """The advantage of a call falls from its first token to its last; the last call keeps one number."""
    found: list[list[float | npt.NDArray[np.floating]]] = []
    for member, values in zip(group.trajectories, identical(group, advantage), strict=True):
        own: list[float | npt.NDArray[np.floating]] = [
            value * np.linspace(1.0, 0.0, len(call.response_ids))
            for call, value in zip(member.transitions, values, strict=True)
        ]
        found.append([*own[:-1], float(values[-1])])
    return found


def spread(group: Group, advantage: GroupAdvantage) -> Advantages:
    """`identical`, said for each token."""
    return [
        [np.full(len(call.response_ids), value) for call, value in zip(member.transitions, values, strict=True)]
        for member, values in zip(group.trajectories, identical(group, advantage), strict=True)
    ]


@pytest.mark.parametrize("step", ["linear", "tree", "per-call"])
def test_its_gradient_is_that_of_an_independent_computation(
    open_engine: Callable[..., TorchEngine], exact_norm: None, step: str
) -> None:
    engine, group = open_engine(dtype="float64", step=step), group_of(1.0, 0.0, 0.25)
    algorithm = LightningRL("dr_grpo", credit=falling, normalization="rollout-mean")
    engine.forward_backward(algorithm.batch([group]).samples, algorithm.loss)
    model = engine._opened().model
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    total: torch.Tensor = torch.zeros((), dtype=torch.float64)
    for member in group.trajectories:
        tokens = sum(len(call.response_ids) for call in member.transitions)
        centred = member.reward - (1.0 + 0.0 + 0.25) / 3
        for call in member.transitions:
            ids, start = [*call.prompt_ids, *call.response_ids], len(call.prompt_ids)
            chosen = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            chosen = chosen[range(len(call.response_ids)), list(call.response_ids)]
            last = call is member.transitions[-1]
            shape = torch.ones_like(chosen) if last else torch.linspace(1.0, 0.0, len(chosen), dtype=torch.float64)
            total = total - (centred * shape * chosen).sum() / (3 * tokens)
    total.backward()  # type: ignore[no-untyped-call]
    assert found
    for name, parameter in model.named_parameters():
        if name in found and parameter.grad is not None:
            largest = parameter.grad.abs().max()
            assert (found[name] - parameter.grad).abs().max() <= 1e-6 * largest, name


@pytest.mark.parametrize("low_level", [name for name in PRESETS if name != "ppo"])
def test_tokens_that_are_all_alike_are_the_call(low_level: LowLevel) -> None:
    group = group_of(1.0, 0.0, 0.25, 0.5)
    one, each = (LightningRL(low_level, credit=credit).batch([group]) for credit in ("identical", spread))
    assert batch_digest(one) == batch_digest(each)


def test_an_audit_sees_the_advantage_of_a_single_token() -> None:
    group = group_of(1.0, 0.0)

    def last(group: Group, advantage: GroupAdvantage) -> Advantages:
        found = [list(own) for own in falling(group, advantage)]
        found[0][0] = np.asarray(found[0][0]) + np.array([0.0, 0.0, 1e-6])
        return found

    digests = [batch_digest(LightningRL("rloo", credit=credit).batch([group])) for credit in (falling, falling, last)]
    assert digests[0] == digests[1] != digests[2]


def test_a_call_is_left_out_only_if_all_its_tokens_have_0() -> None:
    (member,) = group_of(1.0).trajectories
    advantages = [[np.zeros(3), np.array([0.0, 1.0]), np.zeros(4)]]
    (row,) = build_samples([member], advantages, drop_zero_advantages=True)
    assert [span.seq for span in row.spans] == [1]
    assert row.advantages[row.weights != 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own: [own[0][:2], *own[1:]], "gave 2 numbers for 3 response tokens of rollout g/0 attempt 1 call 0"),
        (lambda own: [own[0], np.ones((2, 1)), own[2]], r"gave numbers of the shape \(2, 1\) for 2 response tokens of"),
        (lambda own: [own[0], own[2]], r"gave numbers of the shapes .* whose rollouts have \[3, 2\] calls"),
    ],
)
def test_arrays_of_another_length_are_refused_with_both_lengths(change: Callable[[list], list], said: str) -> None:  # type: ignore[type-arg]
    group = group_of(1.0, 0.0)

    def credit(group: Group, advantage: GroupAdvantage) -> Advantages:
        first, *others = spread(group, advantage)
        return [change(list(first)), *others]

    for low_level in ("grpo", "reinforce++"):
        with pytest.raises(DataError, match=f"the credit function .*credit {said}"):
            LightningRL(low_level, credit=credit).batch([group])


def test_rows_refuse_arrays_of_another_length_too() -> None:
    (member,) = group_of(1.0).trajectories
    with pytest.raises(
        DataError, match="call 1 cannot be trained on: its advantage has 3 numbers for 2 response token"
    ):
        build_samples([member], [[1.0, np.ones(3), 1.0]])
    with pytest.raises(DataError, match="call 2 cannot be trained on: its advantage is nan"):
        build_samples([member], [[1.0, 1.0, np.array([0.0, np.nan, 1.0, 1.0])]])


@pytest.mark.parametrize(("value", "reason"), [(np.inf, "advantage_not_finite"), (1e20, "advantage_too_large")])
def test_a_single_token_is_enough_to_leave_a_group_out(value: float, reason: str) -> None:
    def credit(group: Group, advantage: GroupAdvantage) -> Sequence[Sequence[float | npt.NDArray[np.floating]]]:
        found = [list(own) for own in spread(group, advantage)]
        np.asarray(found[1][1])[1] = value
        return found

    named: Credit = credit
    assert LightningRL(credit=named).batch([group_of(1.0, 0.0)]).skipped == {reason: 1}
