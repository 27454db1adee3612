"""What several tests of the examples need: tokenizer and conversations without a network, the shipped folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lightning_examples.raw_python import MODEL
from lightning_examples.raw_python.make_model import NOISY, demonstrate
from lightning_examples.recipe.chatml import Conversation, build_tokenizer, render
from lightning_examples.word_problems import tasks
from transformers import PreTrainedTokenizerFast

from tests.core.cli.conftest import lightning  # noqa: F401 — a fixture


@pytest.fixture(scope="session")
def conversations() -> list[Conversation]:
    rng = random.Random(3)
    return [demonstrate(task, rng, NOISY) for task in tasks(200, seed=3)]


@pytest.fixture(scope="session")
def tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    return build_tokenizer((render(conversation) for conversation in conversations), vocab_size=512)


@pytest.fixture(scope="session")
def shipped() -> Path:
    return MODEL
