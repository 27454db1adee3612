"""The tiny models that other tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.testing.tiny_models import make_tiny_model, make_tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "1 + 2? ünï 漢"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_loads_and_its_vocabulary_is_the_tokenizers(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "m", architecture=architecture, tied=tied)  # type: ignore[arg-type]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 320
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    text = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert model(torch.tensor([ids])).logits.isfinite().all()
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_seed_decides(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (
        load_file(make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors")["lm_head.weight"]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_conversation_extends_itself(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "m"))
    asked = tokenizer.apply_chat_template(MESSAGES[:2], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert whole.startswith(asked)
    assert whole[len(asked) :].startswith('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')


@pytest.mark.parametrize("vocab", [263, 320, 1500])
def test_the_vocabulary_has_the_size_asked_for(vocab: int) -> None:
    assert make_tiny_tokenizer(vocab).get_vocab_size() == vocab


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use at least 263"):
        make_tiny_tokenizer(262)
    with pytest.raises(ValueError, match="multiple of 64"):
        make_tiny_model(tmp_path / "m", hidden=96)
