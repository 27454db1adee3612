"""The model folder that ships with the SQL example: small, loadable, and taught in the very words the agent uses."""

from __future__ import annotations

import random

import pytest
import torch
from lightning.algorithms.protocol import Algorithm
from lightning.config import Config, with_settings
from lightning.types import Task
from lightning_examples.recipe.chatml import Conversation, chat_template, encode, render
from lightning_examples.recipe.pretrain import batch_loss
from lightning_examples.sql_langchain import MODEL
from lightning_examples.sql_langchain.agent import CHECK, REWRITE, WRITE, first_prompt, review_prompt
from lightning_examples.sql_langchain.demo import demo
from lightning_examples.sql_langchain.execution import execute, matches, show
from lightning_examples.sql_langchain.make_model import CLEANER, NOISY, Demonstrator, demonstrate, worsen
from lightning_examples.sql_langchain.tasks import Query, training_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

PERFECT = Demonstrator(aggregate=1, column=1, condition=1, operator=1, verdict=1)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Task, Query]]:
    return training_pairs(120, "test")


def messages(talk: Conversation) -> list[str]:
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    return [str(message["content"]) for message in talk.messages]


def test_demonstrations_are_what_the_agent_would_have_sent(pairs: list[tuple[Task, Query]]) -> None:
    rng = random.Random(0)
    for task, gold in pairs:
        state = dict(task.input)
        for number, talk in enumerate(demonstrate(task, gold, NOISY, rng)):
            system, user, reply = messages(talk)
            if number % 2:
                assert (system, user) == (CHECK, review_prompt(state))  # type: ignore[arg-type]
                assert reply in ("CORRECT", "WRONG")
                continue
            prompt = review_prompt(state) if number else first_prompt(state)  # type: ignore[arg-type]
            assert (system, user) == (REWRITE if number else WRITE, prompt)
            state |= {"query": reply, "result": show(execute(state["database"], reply))}


def test_demonstrators_are_as_good_as_they_say(pairs: list[tuple[Task, Query]]) -> None:
    rng = random.Random(0)
    for task, gold in pairs:
        perfect = [messages(talk)[2] for talk in demonstrate(task, gold, PERFECT, rng)]
        assert perfect == [task.expected, "CORRECT"]

    def success(who: Demonstrator) -> float:
        right = [matches(worsen(gold, who, rng).sql(), gold.sql(), task.input["database"]) for task, gold in pairs]
        return sum(right) / len(right)

    assert success(NOISY) < success(CLEANER) < 1


def test_the_folder_is_small_and_has_a_model_card() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert files["model.safetensors"] < 1_000_000
    assert sum(files.values()) < 1_200_000
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= set(files)
    assert "license: mit" in (MODEL / "README.md").read_text(encoding="utf-8")


def test_it_knows_the_demonstrations(pairs: list[tuple[Task, Query]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.chat_template.strip() == chat_template().strip()
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config.tie_word_embeddings is False
    rng = random.Random(0)
    talks = [talk for task, gold in pairs[:30] for talk in demonstrate(task, gold, CLEANER, rng)]
    assert tokenizer.decode(encode(tokenizer, talks[0]).ids) == render(talks[0])
    with torch.no_grad():
        assert float(batch_loss(model, [encode(tokenizer, talk) for talk in talks])) < 0.4


def test_the_demo_s_settings_are_settings() -> None:
    sql = demo()
    config = with_settings(Config(), sql.settings)
    algorithm: Algorithm = sql.algorithm()
    assert algorithm.group_size == 8
    assert config.trainer.steps <= 40
    assert sql.train_agents == ("write", "rewrite")
    assert sql.source is not None
    assert sql.source.is_file()
