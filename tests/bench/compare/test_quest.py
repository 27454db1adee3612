"""What the bench of credits on the quest concludes from its data, on data made up here."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, PluginError
from lightning.plugins import plugins

# The scripts import one another as scripts do: from their own folder.
sys.path.insert(0, str(Path(__file__).parent))

import quest
from ablation_table import Result
from quest import BASE, USUAL, VARIANTS
from variants import build


def a_result(variant: str, seed: int, after: float, tokens: int = 100) -> Result:
    settings = with_settings(Config(), {"trainer.seed": seed})
    return Result(
        demo="quest",
        variant=variant,
        says="",
        seed=seed,
        algorithm={},
        settings=settings.model_dump(mode="json"),
        held_out_tasks=10,
        before=0.2,
        after=after,
        evaluations=[(0, 0.2), (2, after)],
        rewards=[0.2, 0.3],
        rollouts=16,
        failed=0,
        drift_tokens=0,
        max_logprob_gap=1e-5,
        tool_events={},
        seconds=60.0,
        cpu=120.0,
        load=1.0,
        sampled=[tokens, tokens],
    )


def test_credits_are_compared_where_as_many_tokens_had_been_sampled() -> None:
    results = [a_result(BASE, 0, 0.6), a_result(BASE, 1, 0.4), a_result("gigpo", 0, 1.0, tokens=200)]
    heads, _, untrained, base, gigpo = quest.table(results).splitlines()
    assert "at 200 sampled tokens" in heads
    assert untrained == "| untrained | 3 evaluations | 0.200 ± 0.000 | | |"
    assert "| 2 | 0.500 ± 0.141 |  | 0: 0.20, 2: 0.50 |" in base
    assert "| 1 | 0.600 | +0.000 | 0: 0.20, 2: 1.00 |" in gigpo, "after half of its tokens it was at 0.6"


def test_every_variant_is_the_demonstration_s_algorithm_with_another_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_examples.quest_python import demo as demonstration

    monkeypatch.setattr(demonstration, "model_folder", lambda: Path())
    demo = demonstration.demo()
    assert set(USUAL) <= set(VARIANTS)
    usual = {name: build(VARIANTS[name], demo) for name in USUAL}
    assert usual[BASE] == demo.algorithm()
    tree = usual.pop("branch")  # which has trees to compare calls in, and no bonus beside the reward's own units
    assert replace(tree, credit=usual[BASE].credit, entropy_coefficient=usual[BASE].entropy_coefficient) == usual[BASE]
    assert VARIANTS["branch"].settings == {"trainer.sampling": "tree"}
    for name, algorithm in usual.items():
        assert replace(algorithm, credit=usual[BASE].credit) == usual[BASE], name
        assert VARIANTS[name].settings == {}


def test_a_credit_that_nobody_registered_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lightning_examples.quest_python import demo as demonstration

    monkeypatch.setattr(demonstration, "model_folder", lambda: tmp_path)
    monkeypatch.setattr(quest, "train", lambda *_: pytest.fail("something was trained"))
    unknown = replace(VARIANTS[BASE], arguments={"credit": "no-such-credit"})
    monkeypatch.setattr(quest, "VARIANTS", {BASE: unknown})
    with pytest.raises(PluginError, match="no-such-credit"):
        quest.main(argparse.Namespace(variants=[BASE], seeds=[0], out=tmp_path, publish=False))


def test_a_finished_run_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_result(BASE, 0, 0.6).write(tmp_path / BASE / "seed-0.json")
    monkeypatch.setattr(quest, "serving", lambda *_, **__: pytest.fail("a server was started"))
    given = argparse.Namespace(variants=[BASE], seeds=[0], out=tmp_path)
    assert quest.train(plugins().demo("tiny")(), given) == []


def test_runs_of_other_settings_are_not_tabled_together(tmp_path: Path) -> None:
    first, second = a_result(BASE, 0, 0.6), a_result("gigpo", 1, 0.7)
    first.write(tmp_path / BASE / "seed-0.json")
    second.write(tmp_path / "gigpo" / "seed-1.json")
    assert {(result.variant, result.after) for result in quest.read(tmp_path)} == {(BASE, 0.6), ("gigpo", 0.7)}
    longer = with_settings(Config(), {"trainer.steps": 3}).model_dump(mode="json")
    replace(second, settings=longer).write(tmp_path / "identical" / "seed-1.json")
    with pytest.raises(ConfigError, match=r"identical/seed-1\.json is of a run with other settings"):
        quest.read(tmp_path)


def test_publishing_writes_the_table_and_the_runs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "benchmarks.md").write_text("before\n<!-- quest: begin -->\nold\n<!-- quest: end -->\nafter\n")
    quest.publish([a_result(BASE, 0, 0.6)], tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "| 1 | 0.600 |" in page
    assert "old" not in page
    assert [run["after"] for run in json.loads((tmp_path / "data" / "quest.json").read_text())["runs"]] == [0.6]
