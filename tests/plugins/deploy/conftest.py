"""A project that could be deployed."""

from __future__ import annotations

from pathlib import Path

import pytest

AGENT = '''"""An agent with a helper, a library and a key."""

import os

import openai
from helpers.prompts import PROMPT


def solve(task, llm):
    key = os.environ["SEARCH_KEY"]
    return float(bool(key and PROMPT and openai))
'''
TRAIN = (
    "my_agent:solve", "--model", "Qwen/Qwen3-4B", "--tasks", "data/train.jsonl", "--algorithm", "grpo:group_size=4",
    "--set", "engine.lora.rank=16", "--set", "engine.gradient_checkpointing=true", "--set", "runner.timeout=60",
)  # fmt: skip
"""Arguments of `lightning train` for it."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, which is the current one."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "prompts.py").write_text('PROMPT = "Answer."\n')
    (tmp_path / "helpers" / "shots.txt").write_text("2 + 2 = 4\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"input": "2 + 2?", "expected": "4"}\n')
    (tmp_path / "unused.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
