"""The model folder that ships with the example: small, loadable, taught in the format it is served in, and mediocre."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lightning.algorithms.protocol import Algorithm
from lightning.config import Config, with_settings
from lightning_examples.raw_python.demo import demo
from lightning_examples.recipe.chatml import Conversation, chat_template, encode, render
from lightning_examples.recipe.pretrain import batch_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

LIMIT = 6 * 1024 * 1024


def test_the_folder_is_small_and_has_a_model_card(shipped: Path) -> None:
    files = {path.name: path.stat().st_size for path in shipped.iterdir()}
    assert sum(files.values()) <= LIMIT
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md"} <= set(files)
    assert "license: mit" in (shipped / "README.md").read_text(encoding="utf-8")
    assert json.loads((shipped / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False


def test_its_template_is_the_recipe_s(shipped: Path, conversations: list[Conversation]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    assert tokenizer.chat_template.strip() == chat_template().strip()
    text = tokenizer.apply_chat_template(
        list(conversations[0].messages), tools=list(conversations[0].tools), tokenize=False
    )
    assert text == render(conversations[0])


def test_it_loads_in_float32_and_knows_the_demonstrations(shipped: Path, conversations: list[Conversation]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    model = AutoModelForCausalLM.from_pretrained(shipped)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    rows = [encode(tokenizer, conversation) for conversation in conversations[:32]]
    with torch.no_grad():
        assert float(batch_loss(model, rows)) < 0.6


def test_the_demo_s_settings_are_settings() -> None:
    math = demo()
    config = with_settings(Config(), math.settings)
    algorithm: Algorithm = math.algorithm()
    assert algorithm.group_size == 8
    assert config.trainer.steps <= 40
    assert math.source is not None
    assert math.source.is_file()
