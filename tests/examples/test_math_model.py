"""The math example's model folder, settings and command line: small, taught as it is served, mediocre, and pointed at data."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.config import Config, with_settings
from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.types import LLM, Task
from lightning_examples.math_autogen import MODEL, train
from lightning_examples.math_autogen.agent import _http, agent, grade
from lightning_examples.math_autogen.demo import demo
from lightning_examples.math_autogen.make_model import CLEANER, NOISY, demonstrate
from lightning_examples.math_autogen.tasks import tasks, val_tasks
from lightning_examples.recipe.chatml import chat_template, encode
from lightning_examples.recipe.make import success
from lightning_examples.recipe.pretrain import batch_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parent / "data"


def test_the_folder_is_small_and_has_a_model_card() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(files.values()) < 1_000_000
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md"} <= set(files)
    assert "license: mit" in (MODEL / "README.md").read_text(encoding="utf-8")
    assert json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False


def test_it_loads_in_float32_and_knows_the_demonstrations() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template.strip() == chat_template().strip()
    rng = random.Random(7)
    rows = [encode(tokenizer, demonstrate(task, rng, NOISY)) for task in tasks(32, seed=7)]
    with torch.no_grad():
        assert float(batch_loss(model, rows)) < 0.6


def test_demonstrators_are_right_as_often_as_the_card_says() -> None:
    rng = random.Random(7)
    problems = tasks(1000, seed=7)
    for who, share in ((CLEANER, 0.74), (NOISY, 0.38)):
        assert success([demonstrate(task, rng, who) for task in problems], problems, grade) == pytest.approx(
            share, abs=0.06
        )


def test_the_demo_s_settings_are_settings() -> None:
    math = demo()
    config = with_settings(Config(), math.settings)
    assert config.runner.adapters == ("autogen",)
    assert config.trainer.steps <= 40
    assert math.algorithm().group_size == 8
    assert math.source is not None
    assert math.source.is_file()


class Recorder:
    """Stands in for the trainer: remembers what it was given."""

    def __init__(self, model: object, algorithm: object, *, config: Config) -> None:
        self.model, self.config = model, config
        Recorder.last = self

    def fit(self, agent: object, *, train: list[Task], val: list[Task]) -> None:
        self.tasks = [*train, *val]

    last: Recorder


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Recorder:
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    monkeypatch.setattr(lightning, "Trainer", Recorder)
    train.main()
    return Recorder.last


def test_without_arguments_the_tiny_model_is_trained_on_generated_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran(monkeypatch)
    assert (made.model, made.config) == (MODEL, with_settings(Config(), demo().settings))
    assert len(made.tasks) == 440


def test_gsm8k_and_another_model_are_trained_with_full_size_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TRAINER__STEPS", "7")
    made = ran(monkeypatch, "--gsm8k", str(DATA / "gsm8k.jsonl"), "--model", "Qwen/Qwen2.5-1.5B-Instruct")
    assert made.model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (made.config.engine.lr, made.config.trainer.steps) == (1e-6, 7)
    assert len(made.tasks) == 3


@pytest.mark.slow
@pytest.mark.long
async def test_on_a_real_vllm_it_is_right_now_and_then(tmp_path: Path) -> None:
    server = OwnedVLLM(MODEL, PolicyServerConfig(max_model_len=1024), log=tmp_path / "vllm.log")
    await server.start()
    limit = asyncio.Semaphore(16)

    async def reward(task: Task, llm: LLM) -> Any:
        async with limit:
            return await agent(task, llm)

    try:
        llm = LLM(f"{server.url}/v1", "none", server.model)
        rewards = await asyncio.gather(*(reward(task, llm) for task in val_tasks(120)))
    finally:
        await server.close()
        await _http().aclose()
        _http.cache_clear()
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.55
