"""The demonstration's real LLM, its real agent and a real vLLM: what is trained is what was sampled, in both dtypes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from lightning_examples.smollm2 import model_folder
from transformers import AutoTokenizer

from tests.servers.machine import bfloat16_kernels

pytestmark = pytest.mark.slow


def test_the_converted_model_ends_its_turns_as_the_published_one_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12 + 3\n  is"}], tokenize=True)["input_ids"]
    assert tokenizer.decode(ids).endswith("<|im_start|>user\n12 + 3\n  is<|im_end|>\n")
    assert tokenizer.tokenize("123") == ["1", "2", "3"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("dtype", "mean", "most", "tasks"),
    [
        pytest.param("float32", 1e-4, 1e-3, 1, id="float32"),
        pytest.param("bfloat16", 0.05, 0.6, 2, id="bfloat16", marks=[bfloat16_kernels, pytest.mark.long]),
    ],
)
def test_two_steps_of_it_train_exactly_what_vllm_sampled(
    demo_run: Any, dtype: str, mean: float, most: float, tasks: int
) -> None:
    run = demo_run
    run.steps, run.command = 2, ("demo", "calculator", "--held-out", "2")
    run.start("--set", f"engine.dtype={dtype}", "--set", f"trainer.tasks_per_step={tasks}")
    assert run.wait() == 0, run.output
    run.assert_whole()
    report: Any = run.report()
    assert [one["rewards"].keys() for one in report["evaluations"]] == [{"correct"}] * 2
    for record in run.committed():
        assert record.metrics["failed"] == 0
        assert record.metrics["tree"] == 1.0, "the tree step is what a real model takes"
        assert record.metrics["mean_logprob_gap"] <= mean
        assert record.metrics["p999_logprob_gap"] <= most
    assert "correct before" in run.output
    index = run.folder / "pages" / "index.html"
    assert f"as pages for a browser: {index}" in run.output
    assert "run" in json.loads((index.parent / "lightning-export.json").read_text())["start"]
    command = [sys.executable, "-m", "lightning", "replay", str(run.folder), "--train"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 steps taken again, the weights of 2 compared: equal, bit for bit" in again.stdout
