"""`lightning plan`: from a run's folder to a table or JSON, always said to be a simulation."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.cli.app import main
from lightning.config import Config, load_config
from lightning.policy_server.servers import settings_of_servers
from lightning_planner.cluster import GPUS, Cluster
from lightning_planner.division import commands_of, settings_of
from lightning_replicas import server_set
from lightning_server.config import GatewayProcessesConfig
from lightning_verl.config import VerlConfig

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


def test_adapters_of_several_policies_are_those_of_one_with_as_many_weights(plan: Callable[..., str]) -> None:
    gpus = ("--json", "--gpus", "1", "--serve-on", "0", "--model", "Qwen/Qwen3-4B")
    named = [part for name in ("writer", "editor") for part in (f'{name}.agents=["{name}"]', f"{name}.lora.rank=8")]
    several = [part for each in named for part in ("--set", f"policies.{each}")]
    assert planned(plan(*gpus, *several)) == planned(plan(*gpus, "--set", "engine.lora.rank=16"))


def test_bounds_side_by_side(plan: Callable[..., str]) -> None:
    turns, behind = planned(plan("--json", "--max-staleness", "0", "--max-staleness", "2"))
    assert turns["staleness_max"] == 0
    assert 0 < behind["staleness_max"] <= 2
    # In turns the trainer waits for all rollouts, else it trains meanwhile.
    assert sum(behind["step"].values()) < sum(turns["step"].values()) - TRAIN / 4


def test_on_gpus(plan: Callable[..., str]) -> None:
    node = ("--json", "--model", "Qwen/Qwen3-4B", "--gpus", "8", "--set", "engine.gradient_checkpointing=true")
    shared = (*node, "--serve-on", "0")
    (both,) = planned(plan(*shared))
    (split,) = planned(plan(*node, "--serve-on", "4", "--gpu", "h200"))
    assert [use["role"] for use in both["memory"]] == ["training and serving"]
    assert [use["role"] for use in split["memory"]] == ["training", "serving"]
    (own,) = planned(plan(*shared, "--set", "policy_server.gpus_each=1"))
    assert own["costs"]["server"]["token"] > both["costs"]["server"]["token"], "one GPU reads all the weights"
    (four,) = planned(plan(*node, "--serve-on", "4", "--gpu", "h200", "--set", "policy_server.replicas=4"))
    assert [one["costs"]["servers"] for one in (split, four)] == [1, 4]
    assert four["memory"][1]["items"][0]["bytes"] == 4 * split["memory"][1]["items"][0]["bytes"], "each has the weights"
    (alone,) = planned(plan(*node, "--serve-on", "4", "--set", "gateway.processes=0"))
    assert [one["costs"]["gateway"]["processes"] for one in (split, alone)] == [4, 1]
    assert split["step"]["train"] != both["step"]["train"]
    (careful,) = planned(plan(*shared, "--assume", "train_mfu=0.1"))
    assert careful["step"]["train"] > both["step"]["train"]
    (longer,) = planned(plan(*shared, "--token-scale", "100"))
    assert longer["step"]["train"] > both["step"]["train"]


NODE = (
    "--model",
    "Qwen/Qwen3-8B",
    "--gpus",
    "8",
    "--set",
    "engine.gradient_checkpointing=true",
    "--max-staleness",
    "1",
)


def test_gpus_that_nobody_divided_are_divided(plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(plan("--json", *NODE, "--agents", "1000"))
    division, (found,) = document["division"], document["plans"]
    assert document["cluster"] == division["cluster"]
    assert found["fits"]
    assert found["plan"]["schedule"]["concurrency"] == 1000
    parts = {gain["part"]: gain["plan"] for gain in division["gains"]}
    processes = [one["costs"]["gateway"]["processes"] for name, one in parts.items() if "gateway process" in name]
    assert processes == [1, 4]
    light = next(one for name, one in parts.items() if "adapters alone" in name)
    assert light["step"]["update"] < found["plan"]["step"]["update"]
    assert all(one["contexts"] > 0 for one in parts.values())
    # A run takes these settings, and gives the GPUs so.
    monkeypatch.setattr(server_set, "visible_gpus", lambda: 8)
    config = load_config(overrides=[*division["settings"], "policy_server.device=cuda"], env={})
    dealt = [one.policy_server.gpus for one in settings_of_servers(config)]
    cluster = division["cluster"]
    assert {len(gpus) for gpus in dealt} == {cluster["gpus_each"]}
    assert len(dealt) == cluster["replicas"]
    assert VerlConfig.of(config).world_size in (cluster["gpus"] - cluster["serving"], 0)
    assert GatewayProcessesConfig.of(config).processes == cluster["gateways"] == 4


@pytest.mark.parametrize(
    ("cluster", "gpus", "workers", "commands"),
    [
        (Cluster(GPUS["h100"], 8, 4, 4, 1, 4), [(0,), (1,), (2,), (3,)], 4,
         ("CUDA_VISIBLE_DEVICES=4,5,6,7 ray", "=0,1,2,3 lightning train ... --engine verl")),
        (Cluster(GPUS["h100"], 8, 6, 3, 2), [(0, 1), (2, 3), (4, 5)], 2,
         ("CUDA_VISIBLE_DEVICES=6,7 ray", "=0,1,2,3,4,5 lightning train")),
        (Cluster(GPUS["h100"], 8, 7, 7, 1), [(number,) for number in range(1, 8)], 1, ("lightning train",)),
        (Cluster(GPUS["h100"], 2, 0, 2, 1), [(0,), (1,)], 2, ("lightning train ... --engine verl",)),
    ],
    ids=["four and four", "two each", "one trains", "all train"],
)  # fmt: skip
def test_a_run_takes_the_settings_of_a_division(
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
    gpus: list[tuple[int, ...]],
    workers: int,
    commands: tuple[str, ...],
) -> None:
    monkeypatch.setattr(server_set, "visible_gpus", lambda: 8)
    settings = settings_of(cluster, Config())
    config = load_config(overrides=[*settings, "policy_server.device=cuda"], env={})
    each = [one.policy_server for one in settings_of_servers(config)]
    assert [one.gpus for one in each] == gpus
    assert {one.gpu_memory_utilization for one in each} == {0.4 if cluster.shared else 0.9}
    assert VerlConfig.of(config).world_size == workers
    for command, begins in zip(commands_of(cluster, settings), commands, strict=True):
        assert begins in command
        words = shlex.split(command)
        assert all(each in words for each in settings) is ("ray" not in words)


def test_agents_that_have_nothing_to_do_are_said(plan: Callable[..., str]) -> None:
    for bound, said in (("0", True), ("1", False)):
        (found,) = planned(plan("--json", *NODE[:4], "--serve-on", "4", "--agents", "1000", "--max-staleness", bound))
        assert any("996 of 1000 agents never run" in note for note in found["notes"]) is said


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
    divided = plan(*NODE)
    for word in (
        "what each part gains",
        "to train so:",
        "--set policy_server.replicas=",
        "measured elsewhere",
        "b776be4c",
    ):
        assert word in divided, word
    assert "what each part gains" not in text, "one GPU cannot be divided"


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
        ((*NODE, "--serve-on", "4", "--set", "policy_server.gpus_each=2"), "--serve-on gives them 4"),
        (("--model", "Qwen/Qwen3-32B", "--gpus", "8"), "Try --set engine.gradient_checkpointing=true, --set"),
        (("--model", "Qwen/Qwen3-32B", *NODE[2:]), "fits into no division of 8 x H100"),
        (("--model", "Qwen/Qwen3-32B", *NODE[2:]), "Try --set engine.lora.rank=16, --set engine.verl.sharding"),
        (("--model", "Qwen/Qwen3-4B", "--gpus", "8", "--set", "engine.verl.strategy=megatron"), "strategy=fsdp2"),
    ],
)
def test_what_cannot_be_planned_is_said(plan: Callable[..., str], arguments: tuple[str, ...], says: str) -> None:
    assert says in plan(*arguments)
