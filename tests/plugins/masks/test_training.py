"""Masked calls in the engine, against masked softmaxes of the model's own logits in float64 by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.batch import Sample, Trajectory, build_samples, mask_of, transition_digest
from lightning.engines import rows
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import DataError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import LossOutput, TokenBatch
from lightning.testing.trajectories import make_trajectory
from lightning.types import Transition, logprobs
from lightning_finetuning.distillation_loss import DistillationLoss
from lightning_finetuning.dpo import PreferenceLoss
from lightning_finetuning.sft import NegativeLogLikelihood
from lightning_masks.codes import code_of
from lightning_masks.extra import written
from transformers import AutoModelForCausalLM

VOCAB = 320
LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01, correction=NO_CORRECTION)
OpenEngine = Callable[..., TorchEngine]
TOP = 24
"""More than the strictest masks keep."""
FACTORS = torch.linspace(2, -1, TOP, dtype=torch.float64)


class WithTop:
    """Also scores the most probable tokens, each alone and their entropy among themselves."""

    needs_top_logprobs = TOP

    def __call__(self, batch: TokenBatch) -> LossOutput:
        most, ids = batch.top_logprobs, batch.top_ids
        assert most is not None
        assert ids is not None
        assert (most.diff(dim=-1) <= 0).all()
        assert ((ids < 0) == (most.exp() == 0)).all()
        found, among = LOSS(batch), torch.log_softmax(most, -1)
        scores = most.exp() * most + among.exp() * among
        few = (ids < 0).any(-1)
        metrics = {**found.metrics, "few": float((batch.weights * few).sum())}
        return LossOutput(found.loss + (batch.weights * (scores @ FACTORS)).sum(), metrics)


def masked(call: Transition, generator: np.random.Generator, vocab: int = VOCAB) -> Transition:
    """The call with masks of every kind: none, a few ids kept, a few left out; and with biases in half of the calls."""
    table = np.ones((len(call.response_ids), vocab), np.bool_)
    for row, token in zip(table, call.response_ids, strict=True):
        row[:] = generator.random(vocab) < generator.choice([0.02, 0.5, 0.99, 1.0])
        row[token] = True
    bias = dict.fromkeys(generator.integers(0, vocab, 3).tolist(), 2.5) if generator.random() < 0.5 else {}
    extra = written(vocab, [code_of(row) for row in table], bias)
    values = logprobs(generator.uniform(-4, -1, len(table)).tolist())
    return replace(call, constrained=True, logprobs=values, extras={"masks": extra})


def rollouts(seed: int) -> list[Trajectory]:
    """Siblings of several turns, of which most calls are masked, at two temperatures."""
    generator = np.random.default_rng(seed)
    made = []
    for place in range(3):
        context, calls = list(range(6)), []
        for _ in range(3):
            response = generator.integers(0, VOCAB, int(generator.integers(1, 6))).tolist()
            calls.append((list(context), response))
            context += [*response, 7, 8]
        trajectory = make_trajectory(calls, rollout=f"r{place}")
        sampled = tuple(
            replace(masked(call, generator), temperature=float(generator.choice([0.7, 1.0])))
            if generator.random() < 0.8
            else call
            for call in trajectory.transitions
        )
        made.append(replace(trajectory, transitions=sampled))
    return made


def expected(model: Path, calls: Sequence[tuple[Transition, float]], weights: Sequence[float]) -> torch.Tensor:
    """The loss and its gradient, each call by a forward pass of its own and the masked softmax written out."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    total = torch.zeros((), dtype=torch.float64)
    for (call, advantage), weight in zip(calls, weights, strict=True):
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
        logits = net(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1]
        mask = mask_of(call)
        own = []
        for place, token in enumerate(call.response_ids):
            row, kept = logits[place], torch.ones(VOCAB, dtype=torch.bool)
            if mask is not None:
                one = mask[place : place + 1]
                ids_of = one.ids.expanded()[1].tolist()
                kept[:] = bool(one.is_left_out[0])
                kept[ids_of] = not one.is_left_out[0]
                _, biased_ids, values = one.bias.expanded()
                for biased, value in zip(biased_ids.tolist(), values.tolist(), strict=True):
                    row = row + value * (torch.arange(VOCAB) == biased)
            chances = torch.exp(row / call.temperature) * kept
            chances = chances / chances.sum()
            entropy = -(chances[kept] * chances[kept].log()).sum()
            ratio = torch.exp(chances[token].log() - call.logprobs[place])
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            most = chances.topk(TOP).values
            parts = most[most > 0], most[most > 0] / most.sum()
            pushed = sum((part * part.log() * FACTORS[: len(part)]).sum() for part in parts)
            own.append(-surrogate - 0.01 * entropy + pushed)
        total = total + weight * torch.stack(own).sum()
    total.backward()
    grads = [own.grad.flatten() for own in net.parameters() if own.grad is not None]
    return torch.cat([total.detach()[None], *grads])


def gradient(engine: TorchEngine, samples: Sequence[Sample], kind: str) -> torch.Tensor:
    """The loss, and the gradient behind it."""
    engine._kind = kind  # type: ignore[assignment]
    engine.discard_gradient()
    metrics = engine.forward_backward(list(samples), WithTop()).metrics
    assert 0 < metrics["few"] < 1
    assert metrics["tree"] == (kind == "tree")
    assert metrics["tokens_compared"] == metrics["tokens"]
    grads = [own.grad.flatten() for own in engine._parameters.values() if own.grad is not None]
    return torch.cat([torch.tensor([metrics["loss"]], dtype=torch.float64), *(grad.double() for grad in grads)])


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**16))
def test_gradients_are_those_of_masked_softmaxes_in_every_layout(
    exact_norm: None, model: Path, open_engine: OpenEngine, seed: int
) -> None:
    trajectories = rollouts(seed)
    advantages = [[1.5, -0.5, 2.0]] * len(trajectories)
    samples = build_samples(trajectories, advantages)
    assert len(samples) < 9, "calls share rows"
    weight = {(span.rollout, span.seq): float(row.weights[span.start]) for row in samples for span in row.spans}
    calls = [pair for each in trajectories for pair in zip(each.transitions, advantages[0], strict=True)]
    theirs = expected(model, calls, [weight[call.rollout, call.seq] for call, _ in calls])
    engine = open_engine(dtype="float64")
    for kind in ("linear", "tree", "per-call"):
        ours = gradient(engine, samples, kind)
        assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm()), kind


def test_a_step_sees_each_mask_and_adapters_learn_from_it(open_engine: OpenEngine) -> None:
    from lightning.config import LoraConfig

    trajectories = rollouts(1)
    samples = build_samples(trajectories, [[1.0, -1.0, 1.0]] * 3)
    calls = [call for each in trajectories for call in each.transitions]
    wanted = {call.key: transition_digest(call) for call in calls}
    for engine in (open_engine(), open_engine(lora=LoraConfig(rank=2))):
        assert engine.step(samples, LOSS).seen == wanted


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_values_are_read_under_the_mask_too(open_engine: OpenEngine, kind: str) -> None:
    """What is read beside a step (the gap, references, `begun`) is the masked logprob; free tokens keep theirs."""
    (row, *_) = build_samples([rollouts(3)[0]], [[1.0] * 3])
    assert row.mask is not None
    engine = open_engine(step=kind)
    (under,), (free,) = engine.logprobs([row]), engine.logprobs([replace(row, mask=None)])
    changed = np.abs(under - free) > 1e-6
    assert changed.any()
    assert not changed[~row.mask.is_set].any()


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_losses_that_need_no_sampler_learn_over_all_tokens(open_engine: OpenEngine, kind: str) -> None:
    """Their gradient is that of the same rows without masks, whose masked tokens have no sampler's logprob."""
    trajectories = rollouts(4)
    samples = build_samples(trajectories, [[1.0, -1.0, 1.0]] * 3)
    wanted = {call.key: transition_digest(call) for each in trajectories for call in each.transitions}
    free = [
        replace(row, mask=None, logprobs=np.where(row.mask.is_set, np.float32(np.nan), row.logprobs))
        if row.mask
        else row
        for row in samples
    ]
    own = ClippedPolicyGradient(surrogate=FreeLoss())
    for loss in (NegativeLogLikelihood(), DistillationLoss(), PreferenceLoss(pairs=(("r0", "r1"),)), own):
        engine, other = (open_engine(step=kind, dtype="float64") for _ in range(2))
        for opened in (engine, other):
            opened.step(free, NegativeLogLikelihood())  # away from the reference
        results = [engine.forward_backward(samples, loss), other.forward_backward(free, loss)]
        ours, theirs = (
            torch.cat([each.grad.flatten() for each in opened._parameters.values() if each.grad is not None])
            for opened in (engine, other)
        )
        assert theirs.abs().max() > 0
        assert torch.equal(ours, theirs), loss
        assert results[0].metrics == results[1].metrics
        assert results[0].seen == wanted, "the digest still has the masks"
    engine, other = (open_engine(step=kind, dtype="float64") for _ in range(2))
    engine._driver._config = other._driver._config = OptimizerConfig(epochs=2, minibatches=2)
    assert engine.step(samples, own).metrics == other.step(free, own).metrics


class FreeLoss:
    """A user's loss with a ratio, over all tokens."""

    over_all_tokens = True

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        return -torch.exp(tokens.logprobs - tokens.old_logprobs) * tokens.advantages


def test_a_mask_of_another_vocabulary_is_refused(open_engine: OpenEngine) -> None:
    generator = np.random.default_rng(0)
    whole = rollouts(2)[0]
    call = masked(make_trajectory([((1, 2), (3,))], rollout="other").transitions[0], generator, vocab=VOCAB + 1)
    other = make_trajectory([((1, 2), (3,))], rollout="other")
    samples = build_samples([whole, replace(other, transitions=(call,))], [[1.0] * 3, [1.0]])
    said = (
        r"the training row of rollout other attempt 1 call 0 cannot be trained on: its sampling mask is of a vocabulary of "
        r"321 ids, and the model has 320: make the policy server serve the model that is trained"
    )
    with pytest.raises(DataError, match=said):
        open_engine().step(samples, LOSS)


def test_a_row_whose_mask_cannot_be_is_refused() -> None:
    (row, *_) = build_samples([rollouts(3)[0]], [[1.0] * 3])
    assert row.mask is not None
    with pytest.raises(DataError, match=r"sampling masks of \d+ tokens and \d+ tokens"):
        rows.check(replace(row, mask=row.mask[1:]), VOCAB)
    with pytest.raises(DataError, match="its sampling mask leaves out a token that is trained"):
        rows.check(replace(row, ids=(row.ids + 1) % VOCAB), VOCAB)
    rows.check(row, VOCAB)
