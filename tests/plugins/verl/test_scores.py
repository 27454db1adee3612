"""Logprobs and entropies in chunks, in the place of logits: the same numbers and gradients, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.batch import SamplingMask
from lightning.config import LoraConfig
from lightning.engines import logprobs
from lightning.engines.loading import add_adapters
from lightning.errors import EngineError
from lightning_verl.scores import TokenScores, _Chunked
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from tests.live_bytes import Bytes
from tests.plugins.verl.conftest import random_mask

WORDS, COUNT, TOP = 61, 23, 7
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Qwen3Config", {}),
    "tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "capped": ("Gemma2Config", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "divided": ("GraniteConfig", {"logits_scaling": 4.0}),
}


def make(family: str) -> Any:
    """A random model in evaluation mode."""
    kind, values = FAMILIES[family]
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES, **HEADS, **values)).eval()


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def scalar(log_probs: torch.Tensor, entropy: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    factors = torch.linspace(-1, 2, len(log_probs))
    return (factors * log_probs).sum() + (factors.flip(0) * entropy).sum() + (factors[:, None] * top.exp()).sum()


def written_out(mask: SamplingMask | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids each token's mask keeps, and the biases of their logits, as tables."""
    kept, bias = torch.ones(COUNT, WORDS, dtype=torch.bool), torch.zeros(COUNT, WORDS)
    for token in range(COUNT if mask is not None else 0):
        assert mask is not None
        own = mask[token : token + 1]
        kept[token] = bool(own.is_left_out[0])
        kept[token, own.ids.expanded()[1].tolist()] = not own.is_left_out[0]
        bias[token, own.bias.expanded()[1].tolist()] = 1.0
    return kept, bias


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize(("family", "lora"), [*((name, []) for name in FAMILIES), ("plain", ["q_proj", "lm_head"])])
def test_chunks_are_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, lora: list[str], temperature: float | None
) -> None:
    """Of three tokens each; also where logits are capped or divided, where the output layer has an adapter, and with a
    temperature under sampling masks."""
    model = make(family)
    if lora:
        add_adapters(model, LoraConfig(rank=2, target_modules=lora))
        for name, own in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(own, std=0.2)
    ids = torch.arange(COUNT)[None] * 7 % WORDS
    targets, heat = ids[0].roll(-1), None if temperature is None else torch.full((COUNT,), temperature)
    mask = None if temperature is None else random_mask(targets.numpy(), 0, WORDS)
    kept, bias = written_out(mask)
    whole = ((logits_of(model, ids)[0] + bias) / (temperature or 1.0)).masked_fill(~kept, -torch.inf).log_softmax(-1)
    most, places = whole.topk(TOP)
    entropy = -(whole.exp() * whole.masked_fill(~kept, 0.0)).sum(-1)
    expected = whole[torch.arange(COUNT), targets], entropy, most.clamp(min=torch.finfo().min)
    scalar(*expected).backward()
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    model.zero_grad()

    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 3 * 4 * WORDS)
    made = TokenScores(model, lambda given: logits_of(model, given), tmp_path)
    made.targets, made.temperatures, made.mask, made.wanted, made.top = targets, heat, mask, "also", TOP
    found = model(input_ids=ids, labels=None, use_cache=False)
    assert found["hidden"].shape == (COUNT, 32)
    scores = found["log_probs"], found["entropy"], found["top_logprobs"]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert found["top_ids"].equal(places.masked_fill(most.isneginf(), -1))
    scalar(*scores).backward()
    mine = {name: own.grad for name, own in model.named_parameters() if own.grad is not None}
    assert mine.keys() == gradients.keys()
    for name, own in gradients.items():
        assert float((mine[name] - own).abs().max()) <= 1e-5 * max(1.0, float(own.abs().max())), name
    made.wanted = "only"
    assert model(input_ids=ids).keys() == {"hidden"}


def test_logits_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    model = make("plain")
    with pytest.raises(
        EngineError, match=r"Qwen3ForCausalLM in .* computes its logits in a way this engine does not know"
    ):
        TokenScores(model, lambda given: logits_of(model, given) * 1.5, tmp_path)


def test_the_gradient_of_a_bfloat16_layer_is_summed_in_float32() -> None:
    """Sums of 500 chunks in bfloat16 would lose most of what the last ones add."""
    torch.manual_seed(0)
    layer = nn.Linear(16, WORDS, bias=False).bfloat16()
    hidden, targets = torch.randn(500, 16).abs().bfloat16().requires_grad_(), torch.zeros(500, dtype=torch.int64)
    gradients = []
    for size in (500, 1):
        layer.zero_grad()
        parts = [slice(start, start + size) for start in range(0, 500, size)]
        found, _ = _Chunked.apply(hidden, targets, None, None, 0, layer, parts, layer.weight)  # type: ignore[no-untyped-call]
        found.sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.float())
    one, many = gradients
    assert float((one - many).norm() / one.norm()) < 5e-3


def peak(count: int, width: int) -> int:
    """The most bytes that the passes of an output layer of Qwen3's vocabulary take for a row, with its states, weight and
    gradient. Tensors have no values, and chunks are those of a GPU."""
    words = 151_936
    with Bytes() as counted, FakeTensorMode():
        layer = nn.Linear(width, words, bias=False, dtype=torch.bfloat16)
        hidden = torch.empty(count, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(count, dtype=torch.int64)
        parts = list(logprobs.chunks(count, words, torch.bfloat16, hidden.device))
        found, entropy = _Chunked.apply(hidden, targets, None, None, 0, layer, parts, layer.weight)  # type: ignore[no-untyped-call]
        (found.sum() + entropy.sum()).backward()
    return counted.most


@pytest.mark.parametrize(("width", "gigabytes"), [(4096, 6.5), (5120, 8.0)], ids=["8B", "32B"])
def test_a_row_of_64k_tokens_needs_no_table_of_its_logits(
    monkeypatch: pytest.MonkeyPatch, width: int, gigabytes: float
) -> None:
    """What a row's length adds is its states and their gradient; a table of logits in float32 would add 40 GB, and verl's own
    passes keep three."""
    monkeypatch.delitem(logprobs.CHUNK_BYTES, "cpu")
    monkeypatch.delitem(logprobs.BLOCK_ELEMENTS, "cpu")
    one, two = peak(1000, width), peak(2000, width)  # a whole chunk, and more than two
    each = (two - one) / 1000
    assert 4 * width <= each <= 4 * width + 64
    assert (one + each * (65_536 - 1000)) / 1e9 < gigabytes
