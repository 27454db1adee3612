"""The tree step in float64: the same loss and gradient as one row for each call, whatever the rows share."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.batch import Sample, build_samples
from lightning.batch.radix import Node, build_tree
from lightning.batch.trajectory import Trajectory
from lightning.config import LoraConfig
from lightning.engines import rows
from lightning.engines.torch import layouts, tree
from lightning.engines.torch.engine import TorchEngine
from lightning.engines.torch.layouts import Forest
from lightning.engines.torch.model import CausalLM
from lightning.engines.torch.path_attention import Attending, FlexAttention
from lightning.engines.torch.tree import TreeWalk
from lightning.errors import EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.testing.trajectories import make_trajectory
from lightning.types import logprobs
from transformers import (
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

LOSS = ClippedPolicyGradient(0.2, 0.28, entropy_coefficient=0.01, correction=NO_CORRECTION)
TOLERANCE = 1e-12
VOCAB = 320

OpenEngine = Callable[..., TorchEngine]


def gradient(engine: TorchEngine, samples: Sequence[Sample], kind: str, budget: int = 10_000) -> torch.Tensor:
    """The step's gradient, behind its loss."""
    engine._budget, engine._kind = budget, kind  # type: ignore[assignment]
    chosen = [row for sample in samples for row in rows.by_call(sample)] if kind == "per-call" else list(samples)
    engine.discard_gradient()
    metrics = engine.forward_backward(chosen, LOSS).metrics
    assert metrics["tree"] == (kind == "tree")
    grads = [parameter.grad.flatten() for parameter in engine._parameters.values() if parameter.grad is not None]
    return torch.cat([torch.tensor([metrics["loss"]], dtype=torch.float64), *(grad.double().cpu() for grad in grads)])


def assert_same(one: torch.Tensor, other: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert float((one - other).norm()) <= tolerance * float(one.norm())


@st.composite
def steps(draw: st.DrawFn) -> list[Trajectory]:
    """Rollouts whose calls fork from one another at any token: siblings, sub-agents, duplicates, compaction."""
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    system = generator.integers(0, 4, int(generator.integers(1, 12))).tolist()
    known = [system]
    made = []
    for place in range(draw(st.integers(1, 4))):
        calls: list[tuple[list[int], list[int]]] = []
        for _ in range(draw(st.integers(1, 4))):
            base = known[int(generator.integers(len(known)))]
            prompt = base[: int(generator.integers(1, len(base) + 1))]
            prompt = prompt + generator.integers(0, 4, int(generator.integers(0, 5))).tolist()
            response = generator.integers(0, 4, int(generator.integers(1, 7))).tolist()
            calls.append((prompt, response))
            known.append(prompt + response)
        trajectory = make_trajectory(calls, rollout=f"r{place}")
        sampled = tuple(
            replace(
                call,
                logprobs=logprobs(generator.uniform(-9, -2, len(call.response_ids)).tolist()),
                temperature=0.7 if generator.random() < 0.2 else 1.0,
            )
            for call in trajectory.transitions
        )
        made.append(replace(trajectory, transitions=sampled))
    return made


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps(), st.randoms(use_true_random=False), st.sampled_from([1, 12, 30, 10_000]))
def test_tree_linear_and_per_call_steps_have_one_gradient(
    exact_norm: None,
    open_engine: OpenEngine,
    trajectories: list[Trajectory],
    random: Random,
    budget: int,
) -> None:
    engine = open_engine(dtype="float64")
    advantages = [[random.uniform(-2, 2) for _ in trajectory.transitions] for trajectory in trajectories]
    merged = build_samples(trajectories, advantages)
    reference = gradient(engine, merged, "per-call")
    shuffled = list(merged)
    random.shuffle(shuffled)
    assert_same(reference, gradient(engine, merged, "linear"))
    assert_same(reference, gradient(engine, merged, "tree", budget))
    assert_same(reference, gradient(engine, shuffled, "tree"))


def group(count: int = 4, turns: int = 3) -> tuple[Sample, ...]:
    """Siblings with one prompt, whose turns part ways."""
    generator = np.random.default_rng(1)
    made = []
    for place in range(count):
        context, calls = list(range(20)), []
        for _ in range(turns):
            response = generator.integers(0, VOCAB, 6).tolist()
            calls.append((list(context), response))
            context += response + generator.integers(0, VOCAB, 5).tolist()
        made.append(make_trajectory(calls, rollout=f"r{place}"))
    return build_samples(made, [[(1.0, -0.5, 2.0)[turn % 3] for turn in range(turns)]] * count)


def test_a_tree_computes_each_shared_token_once_and_sees_every_call(exact_norm: None, open_engine: OpenEngine) -> None:
    samples = group()
    metrics, seen = {}, {}
    for kind in ("linear", "tree"):
        engine = open_engine(dtype="float64", step=kind)
        result = engine.step(samples, LOSS)
        metrics[kind], seen[kind] = result.metrics, result.seen
    assert seen["tree"] == seen["linear"]
    assert len(seen["tree"]) == 12
    layout = engine._step_layout(samples)
    assert isinstance(layout, Forest)
    assert metrics["tree"]["tokens_forward"] == len(layout.tree.ids) < metrics["linear"]["tokens_forward"]
    assert (metrics["tree"]["tree"], metrics["linear"]["tree"]) == (1.0, 0.0)
    for name in ("loss", "grad_norm", "tokens", "entropy", "clip_fraction", "max_logprob_gap", "tokens_compared"):
        assert metrics["tree"][name] == pytest.approx(metrics["linear"][name], rel=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("budget", [10_000, 16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_and_gradient_checkpointing_over_a_tree(
    exact_norm: None, open_engine: OpenEngine, budget: int, lora: LoraConfig | None, checkpointing: bool
) -> None:
    plain = open_engine(dtype="float64", lora=lora)
    engine = open_engine(dtype="float64", lora=lora, gradient_checkpointing=checkpointing)
    assert_same(gradient(plain, group(), "linear"), gradient(engine, group(), "tree", budget))
    assert engine._no_tree == "", engine._no_tree


@pytest.mark.slow
def test_branches_without_end(exact_norm: None, open_engine: OpenEngine) -> None:
    """More sub-agents on one path than Python's stack is deep; here their answers differ from each other by a token."""
    count = sys.getrecursionlimit() + 100
    whole = np.random.default_rng(3).integers(0, VOCAB - 1, count).tolist()
    calls = [(whole[: end + 1], [VOCAB - 1]) for end in range(count - 1)]
    samples = build_samples([make_trajectory(calls)], [np.linspace(-1, 1, len(calls)).tolist()])
    engine = open_engine(dtype="float64")
    want = gradient(engine, chosen := samples[:: count // 4], "linear")
    assert_same(want, gradient(engine, chosen, "tree", 300))
    engine._kind, engine._budget = "tree", 10_000
    assert engine.step(samples, LOSS).metrics["tokens_forward"] < 2 * count


def test_a_shortage_of_memory_leads_to_pieces_of_rows(
    exact_norm: None, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a row by itself is too much, the tree goes on with parts of it; the linear step has to give up."""
    (sample,) = group(1, turns=30)
    whole = open_engine(dtype="float64", step="tree")
    want = gradient(whole, [sample], "tree")
    original = CausalLM.hidden_attending
    sizes = []

    def limited(self: CausalLM, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(ids.shape[1])
        if ids.shape[1] > 100:
            raise torch.OutOfMemoryError("out of memory")
        return original(self, ids, *arguments)

    monkeypatch.setattr(CausalLM, "hidden_attending", limited)
    engine = open_engine(dtype="float64", step="tree")
    assert_same(want, gradient(engine, [sample], "tree", 4096))
    assert max(sizes) == len(sample.ids) > 300
    assert engine._budget < len(sample.ids)

    def never(self: CausalLM, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(CausalLM, "hidden_attending", never)
    with pytest.raises(EngineError, match=r"64 tokens at a time.*: set engine\.gradient_checkpointing"):
        engine.step([sample], LOSS)


def test_on_a_cpu_activations_bound_a_pass_too(
    exact_norm: None, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sizes = open_engine(dtype="float64"), []
    want = gradient(engine, group(16), "tree")
    original = CausalLM.hidden_attending

    def noting(self: CausalLM, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(ids.shape[1])
        return original(self, ids, *arguments)

    monkeypatch.setattr(CausalLM, "hidden_attending", noting)
    config = engine._opened().model.config
    each = 4 * config.num_hidden_layers * (10 * config.hidden_size + 4 * config.intermediate_size)
    monkeypatch.setattr(layouts, "CPU_BYTES", 100 * each)
    assert_same(want, gradient(engine, group(16), "tree"))
    assert 20 < max(sizes) <= 50  # a tree larger than the budget is cut into halves of it


KEPT, LIGHT = True, False
"""Whether a pass keeps its graph."""


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # One path of six packs: the budget has room for the first and for one behind it; the others are computed again.
        ([300], [(50, KEPT), *[(50, LIGHT)] * 4, (50, KEPT), *[(50, KEPT)] * 4]),
        # A trunk of 20 tokens, from which 40 with twigs of 30 and 8 and a branch of 45 go off: there is room for each path.
        ([20, (40, 30), (40, 8), (45,)], [(20, KEPT), (48, KEPT), (30, KEPT), (45, KEPT)]),
    ],
)
def test_as_many_tokens_are_kept_as_the_budget_allows(
    exact_norm: None,
    open_engine: OpenEngine,
    rows: list[Any],
    expected: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(dtype="float64", step="tree")
    trunk, *tails = rows
    parts = [[(0, trunk), *((length, length) for length in tail)] for tail in tails or [()]]
    ids = [np.concatenate([np.arange(count) + first for first, count in own]).astype(np.int32) for own in parts]
    tree = build_tree([own % engine._opened().vocab_size for own in ids])
    passes: list[tuple[int, bool]] = []

    def visit(hidden: torch.Tensor, runs: Sequence[Node]) -> torch.Tensor:
        return hidden.sum()

    original = CausalLM.hidden_attending

    def noting(self: CausalLM, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        passes.append((ids.shape[1], torch.is_grad_enabled()))
        return original(self, ids, *arguments)

    monkeypatch.setattr(CausalLM, "hidden_attending", noting)
    assert TreeWalk(engine._opened(), tree, [True] * len(tree.nodes), 100, visit).run() == len(tree.ids)
    assert passes == expected


def test_without_gradients_the_keys_and_values_of_one_path_are_held(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the tree: a pack lets its own go when all that goes on behind it is done."""
    samples = group(8, turns=5)
    engine = open_engine(step="tree")
    layout = engine._step_layout(samples)
    expected = layouts.read_logprobs(layout, engine._opened(), 10_000).logprobs
    original = CausalLM.hidden_attending
    kept: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    held = []

    def noting(self: CausalLM, ids: torch.Tensor, positions: torch.Tensor, attending: Attending) -> torch.Tensor:
        hidden = original(self, ids, positions, attending)
        kept.extend((ids.shape[1], weakref.ref(keys)) for keys, _ in list(attending.own.values())[:1])
        held.append(sum(size for size, keys in kept if keys() is not None))
        return hidden

    monkeypatch.setattr(CausalLM, "hidden_attending", noting)
    found = layouts.read_logprobs(layout, engine._opened(), 20).logprobs
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert 0 < max(held) <= max(layout.lengths)
    assert sum(size for size, _ in kept) > 4 * max(held)
    assert not any(keys() is not None for _, keys in kept)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["linear", "tree", "auto"])
def test_a_bfloat16_tree_computes_in_bfloat16_as_the_linear_step_does(
    open_engine: OpenEngine, kind: str, lora: LoraConfig | None
) -> None:
    engine = open_engine(dtype="bfloat16", step=kind, lora=lora)
    layer = next(module for module in engine._opened().model.modules() if isinstance(module, torch.nn.Linear))
    seen: set[torch.dtype] = set()
    layer.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    assert engine.step(group(16), LOSS).metrics["tree"] == (kind != "linear"), engine._no_tree
    assert seen == {torch.bfloat16}


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def folder(path: Path, config: PretrainedConfig, change: Callable[[Any], object] = lambda model: None) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        change(model)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL, **HEADS),
        LlamaConfig(**SMALL, **HEADS),
        GemmaConfig(**SMALL, **HEADS, head_dim=8),
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families(config: PretrainedConfig, tmp_path: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(folder(tmp_path / "model", config), dtype="float64")
    # Their norms round to float32 inside, so a sum in another order is not the same to the last bit.
    assert_same(gradient(engine, group(), "linear"), gradient(engine, group(), "tree"), 1e-5)
    assert engine._no_tree == "", engine._no_tree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_may_be_as_large_as_those_of_a_trained_model(
    tmp_path: Path, open_engine: OpenEngine, dtype: str
) -> None:
    """Training makes the last norm's weights large: a difference counts relative to the states."""
    path = folder(
        tmp_path / "model", LlamaConfig(**SMALL, **HEADS), lambda model: model.model.norm.weight.fill_(1000.0)
    )
    engine = open_engine(path, dtype=dtype, step="tree")
    assert tree.why_no_tree(engine._opened()) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_tokens_hear_of_their_neighbours_otherwise_has_no_tree(
    open_engine: OpenEngine, dtype: str
) -> None:
    """A little of the token that stands before each, as in models that shift or convolve tokens."""
    engine = open_engine(dtype=dtype, step="tree")
    layer = engine._opened().model.get_input_embeddings()
    layer.register_forward_hook(lambda _, __, states: states + 0.3 * states.roll(1, dims=1) * (states.shape[1] > 1))
    assert tree.why_no_tree(engine._opened()).startswith("its hidden states depend on more than the keys and values")


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        ("float32", "its attention is 'eager'"),
        ("bfloat16", "its hidden states depend on more"),
    ],  # sdpa biases it otherwise
)
def test_a_model_that_biases_its_attention_by_distance_has_no_tree(
    tmp_path: Path, open_engine: OpenEngine, dtype: str, why: str
) -> None:
    alibi = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    engine = open_engine(folder(tmp_path / "model", alibi), dtype=dtype, step="tree")
    assert engine.step(group(), LOSS).metrics["tree"] == 0.0
    assert engine._no_tree.startswith(why)


@pytest.mark.parametrize(("kind", "level"), [("tree", logging.WARNING), ("auto", logging.INFO)])
def test_a_model_with_a_window_is_computed_row_by_row(
    tmp_path: Path, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture, kind: str, level: int
) -> None:
    """What was asked for by name and is not had is a warning; what `auto` chose is not."""
    path = folder(tmp_path / "model", MistralConfig(**SMALL, **HEADS, sliding_window=8))
    engine, samples = open_engine(path, step=kind), group(16)
    with caplog.at_level(logging.INFO, logger="lightning"):
        first = engine.step(samples, LOSS)
        engine.step(samples, LOSS)
    count, unique = sum(map(rows.trained_length, samples)), len(build_tree([row.ids for row in samples]).ids)
    assert (first.metrics["tree"], first.metrics["tokens_forward"]) == (0.0, count)
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == (
        f"MistralForCausalLM ({path}) is computed row by row, not as a tree: it attends to a window of 8 tokens. It costs "
        f"{count / unique:.1f} times the tokens: {count}, of which {unique} are unique, in the first step. To accept that, "
        'set engine.step = "linear"; else train a model that attends to all earlier tokens in every layer'
    )


def test_auto_takes_the_tree_when_it_pays(open_engine: OpenEngine) -> None:
    engine = open_engine()
    assert engine.step(group(1), LOSS).metrics["tree"] == 0.0
    assert engine.step(group(16), LOSS).metrics["tree"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
def test_a_step_by_flex_attention(exact_norm: None, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA device runs, by torch's reference implementation; on a CPU torch only refuses to go backward."""
    engine = open_engine(dtype="float64")
    want = gradient(engine, group(), "linear")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(tree, "kernel_for", lambda device: FlexAttention)
    assert_same(want, gradient(engine, group(), "tree"))
    assert_same(want, gradient(engine, group(), "tree", 64))
    assert engine._no_tree == "", engine._no_tree


def test_memory_that_runs_out_on_siblings_makes_smaller_batches(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(step="tree", tokens_per_microbatch=10_000)
    want = open_engine(step="tree").step(group(), LOSS).metrics["grad_norm"]
    original = layouts.token_logprobs  # type: ignore[attr-defined]
    sizes = []

    def limited(hidden: torch.Tensor, *arguments: Any) -> object:
        sizes.append(len(hidden))
        if len(hidden) > 60:
            raise torch.OutOfMemoryError("out of memory")
        return original(hidden, *arguments)

    monkeypatch.setattr(layouts, "token_logprobs", limited)
    assert engine.step(group(), LOSS).metrics["grad_norm"] == pytest.approx(want, rel=1e-5)
    assert max(sizes) > 60 >= sizes[-1]
