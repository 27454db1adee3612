"""Logprobs and losses against the model's own logits, computed the slow way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.engines.logprobs import chunks, token_logprobs
from lightning.engines.rows import plan
from lightning.engines.torch.engine import TorchEngine
from lightning.engines.torch.model import AddingEmbedding, AddingLinear, add_in_place
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM


def slow_logprobs(folder: Path, sample: Sample) -> np.ndarray:
    """Every token from a forward pass of its own prefix."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    values = [float("nan")]
    with torch.no_grad():
        for place in range(1, len(sample)):
            logits = model(input_ids=torch.tensor(sample.ids[None, :place].astype(np.int64))).logits[0, -1]
            values.append(float(torch.log_softmax(logits / sample.temperature, -1)[int(sample.ids[place])]))
    return np.array(values)


def test_padded_rows_have_the_models_own_logprobs(
    model: Path, open_engine: Callable[..., TorchEngine], make_row: Callable[..., Sample]
) -> None:
    rows = [
        make_row(5, [], seed=1),
        make_row(17, [], seed=2, temperature=0.7),
        make_row(1, []),
        make_row(9, [], seed=3),
    ]
    for engine in (open_engine(), open_engine(tokens_per_microbatch=1)):
        for row, values in zip(rows, engine.logprobs(rows), strict=True):
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, slow_logprobs(model, row), atol=2e-5)


def test_loss_and_entropy_are_those_of_a_slow_loop(
    model: Path, open_engine: Callable[..., TorchEngine], make_row: Callable[..., Sample]
) -> None:
    row = make_row(12, [(3, 6, 1.5, 0.1), (9, 12, -0.5, 0.2)], logprob=-4.0)
    logprobs = slow_logprobs(model, row)
    expected = 0.0
    for place in np.flatnonzero(row.weights):
        ratio = float(np.exp(logprobs[place] + 4.0))
        advantage = float(row.advantages[place])
        expected -= float(row.weights[place]) * min(ratio * advantage, float(np.clip(ratio, 0.8, 1.28)) * advantage)
    metrics = open_engine().step([row], ClippedPolicyGradient(correction=NO_CORRECTION)).metrics
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["max_logprob_gap"] == pytest.approx(np.nanmax(np.abs(logprobs + 4.0)[row.weights != 0]), rel=1e-4)
    assert metrics["mean_logprob_gap"] == pytest.approx(np.abs(logprobs + 4.0)[row.weights != 0].mean(), rel=1e-4)
    assert metrics["tokens"] == metrics["tokens_compared"] == 6


def test_masked_logits_have_finite_entropy() -> None:
    logits = torch.tensor([[1.0, 2.0, -float("inf")]])
    logprobs, entropy, top, ids = token_logprobs(logits, torch.tensor([1]), None, lambda given: given, top=3)
    p = torch.tensor([1.0, 2.0]).softmax(-1)
    assert entropy.item() == pytest.approx(float(-(p * p.log()).sum()))
    assert logprobs.item() == pytest.approx(float(p[1].log()))
    assert top.tolist() == [[pytest.approx(float(p[1].log())), pytest.approx(float(p[0].log())), torch.finfo().min]]
    assert ids.tolist() == [[1, 0, -1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperatures", [None, torch.linspace(0.5, 1.5, 9)], ids=["plain", "temperatures"])
def test_an_output_layer_in_place_has_autograds_gradients(
    dtype: torch.dtype, bias: bool, temperatures: torch.Tensor | None
) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(5, 7, bias=bias, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    hidden = torch.randn(9, 5, dtype=layer.weight.dtype, generator=generator, requires_grad=True)
    targets = torch.arange(9) % 7
    computing = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
    add_in_place(layer)
    factors = torch.linspace(-1, 2, 27).reshape(9, 3)
    for _ in range(2):  # the second is added to the first
        with computing:
            logprobs, entropy, top, ids = token_logprobs(hidden, targets, temperatures, layer, top=3)
        (logprobs - 0.1 * entropy + (factors * top).sum(-1)).sum().backward()
    heat = 1.0 if temperatures is None else temperatures[:, None].to(layer.weight.dtype)
    table = torch.log_softmax(torch.nn.functional.linear(hidden, layer.weight, layer.bias) / heat, -1)
    most, places = table.topk(3)
    expected = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1), most
    total = (expected[0] - 0.1 * expected[1] + (factors * most).sum(-1)).sum() * 2
    theirs = torch.autograd.grad(total, [hidden, *layer.parameters()])
    near = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close((logprobs, entropy, top), expected, **near)
    assert dtype is torch.bfloat16 or ids.equal(places)
    torch.testing.assert_close((hidden.grad, *(own.grad for own in layer.parameters())), theirs, **near)


def test_a_layer_in_place_takes_any_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(5, 7, dtype=torch.float64)
    for shape in ((2, 3, 5), (5,)):
        given = torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        expected = torch.autograd.grad(
            torch.nn.functional.linear(given, layer.weight, layer.bias).square().sum(), [given, *layer.parameters()]
        )
        add_in_place(layer)
        layer.zero_grad()
        layer(given).square().sum().backward()
        torch.testing.assert_close((given.grad, *(own.grad for own in layer.parameters())), expected)


def test_casts_are_kept_while_weights_do_not_change() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 7, bias=False) for _ in range(2))
    casts, given, weight = add_in_place(layers), torch.randn(4, 5, requires_grad=True), layers[0].weight
    low = torch.bfloat16
    with torch.autocast("cpu", dtype=low):
        apart = [layer(given) for layer in layers]
        with casts.keeping():
            together = [layer(given) for layer in layers]
            assert casts.weight(weight, low) is casts.weight(weight, low)
            torch.testing.assert_close(together, apart, rtol=0, atol=0)
            torch.stack(together).sum().backward()
            expected = torch.stack([layer.weight.detach().to(low) for layer in layers]).float().sum((0, 1))
            torch.testing.assert_close(given.grad, expected.expand(4, 5), rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        torch.testing.assert_close(casts.weight(weight.neg_(), low), weight.to(low), rtol=0, atol=0)


def test_layers_that_are_not_trained_or_not_plain_stay_as_they_are() -> None:
    class Own(torch.nn.Linear):
        pass

    frozen, own, trained = torch.nn.Linear(2, 2), Own(2, 2), torch.nn.Linear(2, 2)
    frozen.requires_grad_(False)
    kept, scaled = torch.nn.Embedding(3, 2), torch.nn.Embedding(3, 2, scale_grad_by_freq=True)
    add_in_place(torch.nn.ModuleList([frozen, own, trained, kept, scaled]))
    found = [type(module) for module in (frozen, own, trained, kept, scaled)]
    assert found == [torch.nn.Linear, Own, AddingLinear, AddingEmbedding, torch.nn.Embedding]


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_embedding_in_place_has_autograds_gradient(dtype: torch.dtype, padding: int | None) -> None:
    layer = torch.nn.Embedding(5, 3, padding_idx=padding, dtype=dtype)
    ids, weights = torch.tensor([[0, 2, 4], [2, 2, 1]]), torch.arange(18, dtype=dtype).reshape(2, 3, 3)
    (expected,) = torch.autograd.grad((layer(ids) * weights).sum() * 2, [layer.weight])
    add_in_place(layer)
    for _ in range(2):
        (layer(ids) * weights).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 277), (torch.bfloat16, 554)])
def test_a_chunk_takes_64_mebibytes_at_the_most(dtype: torch.dtype, tokens: int) -> None:
    """As torch's allocator reports it; the vocabulary is SmolLM2's, the weights are small."""
    vocabulary = 49_152
    assert next(chunks(1000, vocabulary, dtype, torch.device("cpu"))) == slice(0, tokens)
    layer = torch.nn.Linear(1, vocabulary, bias=False)
    add_in_place(layer)
    hidden = torch.zeros(tokens, 1, requires_grad=True)
    computing = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        with computing:
            logprobs, entropy = token_logprobs(hidden, torch.zeros(tokens, dtype=torch.int64), None, layer)
        (logprobs - 0.1 * entropy).sum().backward()
    assert measured.profiler is not None
    changes = [event.nbytes() for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert 1 << 25 < np.cumsum(changes).max() <= 1 << 26


def test_plan_fits_the_budget_and_covers_every_row() -> None:
    lengths = [7, 3, 100, 3, 50, 1, 8]
    batches = plan(lengths, 100)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= 100
    assert plan([], 100) == []


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16, "query_pre_attn_scalar": 16}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}),
    ],
)
def test_other_families_and_their_output_layers(
    architecture: str,
    extra: dict[str, object],
    tmp_path: Path,
    open_engine: Callable[..., TorchEngine],
    make_row: Callable[..., Sample],
) -> None:
    sizes: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    if architecture == "gpt2":
        sizes = {}
    config = AutoConfig.for_model(
        architecture,
        vocab_size=320,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
        **extra,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    row = make_row(12, [(6, 12, 1.0, 0.5)])
    engine = open_engine(tmp_path)
    np.testing.assert_allclose(engine.logprobs([row])[0], slow_logprobs(tmp_path, row), atol=1e-4)
    assert engine.step([row], ClippedPolicyGradient(correction=NO_CORRECTION)).metrics["grad_norm"] > 0
