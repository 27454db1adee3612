"""`lightning plan`: from a run's folder to a table or JSON, always said to be a simulation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.cli.app import main

from .conftest import CALL, LEAD, TOOL, TRAIN

ROLLOUT = LEAD + 2 * CALL + TOOL


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> Callable[..., str]:
    """Run `lightning plan` on the recorded run; what it printed, on standard error if it failed."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> str:
        try:
            main(["plan", str(run_folder), "--steps", "5", *arguments])
        except SystemExit as stop:
            if stop.code:
                return capsys.readouterr().err
        return capsys.readouterr().out

    return run


def planned(text: str) -> list[dict[str, object]]:
    document = json.loads(text)
    assert "simulation" in document["label"]
    return [one["plan"] for one in document["plans"]]


def test_as_it_was(plan: Callable[..., str]) -> None:
    (same,) = planned(plan("--json"))
    assert same["step"]["rollout"] == pytest.approx(2 * ROLLOUT, rel=0.05)
    assert same["step"]["train"] == pytest.approx(TRAIN, rel=0.3)
    assert same["staleness_max"] == 0
    document = json.loads(plan("--json"))
    assert document["replay"]["error"] == pytest.approx(0.0, abs=0.05)


def test_with_other_settings(plan: Callable[..., str]) -> None:
    (wide,) = planned(plan("--json", "--set", "runner.concurrency=4"))
    assert ROLLOUT * 0.95 < wide["step"]["rollout"] < 2 * ROLLOUT * 0.75, "all at once, if their calls may take longer"
    (slow,) = planned(plan("--json", "--set", "runner.concurrency=4", "--tool-seconds", "3"))
    assert slow["step"]["rollout"] - wide["step"]["rollout"] == pytest.approx(2 * 3.0), "two tools between the calls"
    (scaled,) = planned(plan("--json", "--set", "runner.concurrency=4", "--tool-scale", "0.5"))
    assert wide["step"]["rollout"] - scaled["step"]["rollout"] == pytest.approx(TOOL / 2)
    (large,) = planned(plan("--json", "--group-size", "4"))
    assert large["step"]["rollout"] == pytest.approx(4 * ROLLOUT, rel=0.05)
    # The recorded steps are all of one size.
    assert any("grow with the tokens" in note for note in large["notes"])
    assert not any("grow with the tokens" in note for note in wide["notes"])


def test_bounds_side_by_side(plan: Callable[..., str]) -> None:
    turns, behind = planned(plan("--json", "--max-staleness", "0", "--max-staleness", "2"))
    assert turns["staleness_max"] == 0
    assert 0 < behind["staleness_max"] <= 2
    # In turns the trainer waits for all rollouts, else it trains meanwhile.
    assert sum(behind["step"].values()) < sum(turns["step"].values()) - TRAIN / 4


def test_on_gpus(plan: Callable[..., str]) -> None:
    shared = ("--json", "--model", "Qwen/Qwen3-4B", "--gpus", "8", "--set", "engine.gradient_checkpointing=true")
    (both,) = planned(plan(*shared))
    (split,) = planned(plan(*shared, "--serve-on", "4", "--gpu", "h200"))
    assert [use["role"] for use in both["memory"]] == ["training and serving"]
    assert [use["role"] for use in split["memory"]] == ["training", "serving"]
    assert any("one policy server on 4 GPUs" in note for note in split["notes"])
    (own,) = planned(plan(*shared, "--tensor-parallel", "1"))
    assert own["costs"]["server"]["token"] > both["costs"]["server"]["token"], "one GPU reads all the weights"
    assert not any("one policy server" in note for note in own["notes"])
    assert split["step"]["train"] != both["step"]["train"]
    (careful,) = planned(plan(*shared, "--assume", "train_mfu=0.1"))
    assert careful["step"]["train"] > both["step"]["train"]
    (longer,) = planned(plan(*shared, "--token-scale", "100"))
    assert longer["step"]["train"] > both["step"]["train"]


def test_options_of_verl_count_and_those_that_do_not_are_said(plan: Callable[..., str]) -> None:
    model = ("--json", "--model", "Qwen/Qwen3-4B", "--gpus", "8", "--serve-on", "4")
    options = ("use_no_sync_for_gradient_accumulation=false", "param_offload=true")
    given = [part for option in options for part in ("--set", f"engine.verl.sharding.{option}")]
    (whole,), (exchanged,) = planned(plan(*model)), planned(plan(*model, *given))
    gradients = [
        next(item["bytes"] for item in one["memory"][0]["items"] if item["name"] == "gradients")
        for one in (whole, exchanged)
    ]
    assert gradients[0] == 4 * gradients[1]
    assert any("engine.verl.sharding.param_offload" in note for note in exchanged["notes"])


def test_what_people_see(plan: Callable[..., str]) -> None:
    text = plan("--model", "Qwen/Qwen3-8B", "--gpus", "1")
    assert text.startswith("simulation: no number of a plan was measured; calibrated on")
    for word in ("played back", "max_staleness 0", "seconds of a step", "AdamW's moments", "does not fit", "train_mfu"):
        assert word in text, word
    assert "do not fit into 80 GB" in text
    assert "memory of a GPU" not in plan()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "8"), "needs both --model and --gpus"),
        (("--model", "Qwen/Qwen3-4B"), "needs both --model and --gpus"),
        (("--token-scale", "0"), "factors above 0"),
        (("--set", "trainer.stpes=3"), "did you mean 'trainer.steps'"),
        (("--max-staleness", "-1"), "--max-staleness -1"),
        (("--recorded-servers", "2"), "No such option"),
        (("--model", "Qwen/Qwen3-4B", "--gpus", "8", "--serve-on", "8"), "at least one GPU has to train"),
        (("--model", "Qwen/Qwen3-4B", "--gpus", "8", "--serve-on", "4", "--tensor-parallel", "2"), "one policy server"),
        (("--model", "Qwen/Qwen3-4B", "--gpus", "8", "--set", "engine.verl.strategy=megatron"), "strategy=fsdp2"),
    ],
)
def test_what_cannot_be_planned_is_said(plan: Callable[..., str], arguments: tuple[str, ...], says: str) -> None:
    assert says in plan(*arguments)
