"""What the long measurements conclude from their data, on data made up here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from lightning.errors import ConfigError, PluginError

# The scripts import one another as scripts do: from their own folder.
sys.path.insert(0, str(Path(__file__).parent))

import engines_table
from ablation_table import Result, against_base, tables
from page import replace_table
from setting import Report, Setting, Step
from summary import Point, Run, cost_to, publish, table
from variants import BASE, VARIANTS, Variant, build, choose, parse
from watch import Meter, run_watched


def a_run(
    arm: str = "trl", seed: int = 0, rewards: tuple[float, ...] = (0.5, 0.7, 0.9), pace: float = 10.0, tools: float = 0
) -> Run:
    points = [
        Point(step, 5.0 + pace * step, 2.0 + 2 * pace * step, reward, reward, "/somewhere/else")
        for step, reward in enumerate(rewards, start=1)
    ]
    versions = {"trl": "1.0", "vllm": "-"}
    return Run(
        arm,
        seed,
        {"steps": 3, "tool_seconds": tools},
        versions,
        5.0,
        2.0,
        40.0,
        70.0,
        0.5,
        points,
        base=0.3,
        held_out_tasks=10,
    )


def a_result(variant: str = BASE, seed: int = 0, after: float = 0.8, demo: str = "tiny") -> Result:
    return Result(
        demo=demo,
        variant=variant,
        says=variant,
        seed=seed,
        algorithm={},
        settings={},
        held_out_tasks=10,
        before=0.3,
        after=after,
        evaluations=[(0, 0.3), (3, after)],
        rewards=[0.3, 0.5, 0.7],
        rollouts=24,
        failed=0,
        drift_tokens=0,
        max_logprob_gap=1e-5,
        tool_events={"ok": 3},
        seconds=60.0,
        cpu=120.0,
        load=1.0,
    )


class ADemo:
    """Of a demonstration an ablation's algorithm needs the group size alone."""

    def algorithm(self):
        return Sized()


@dataclass(frozen=True)
class Sized:
    group_size: int = 4


class TestCostTo:
    def test_grows_evenly_between_two_evaluations(self):
        assert cost_to([(0.0, 0.3), (10.0, 0.5), (20.0, 0.9)], 0.7) == pytest.approx(15.0)

    def test_is_free_where_the_untrained_model_has_it(self):
        assert cost_to([(0.0, 0.8), (10.0, 0.9)], 0.7) == 0.0

    def test_is_none_where_it_is_never_reached(self):
        assert cost_to([(0.0, 0.3), (10.0, 0.69)], 0.7) is None
        assert cost_to([], 0.7) is None

    def test_one_lucky_evaluation_does_not_count(self):
        lucky = [(0.0, 0.3), (10.0, 0.72), (20.0, 0.5), (30.0, 0.6), (40.0, 0.8)]
        assert cost_to(lucky, 0.7) == pytest.approx(35.0)

    def test_the_level_may_have_been_passed_before_it_held(self):
        assert cost_to([(0.0, 0.9), (10.0, 0.1), (20.0, 0.75), (30.0, 0.8)], 0.7) == pytest.approx(10 + 10 * 0.6 / 0.65)


class TestRun:
    def test_costs_count_from_the_first_rollout(self):
        assert a_run().by_seconds == [(0.0, 0.3), (10.0, 0.5), (20.0, 0.7), (30.0, 0.9)]
        assert a_run().by_cpu == [(0.0, 0.3), (20.0, 0.5), (40.0, 0.7), (60.0, 0.9)]

    def test_steps_without_an_evaluation_are_no_points_of_the_curve(self):
        run = a_run().with_held_out([0.0, 1.0], {2: [1.0, 0.0], 3: [1.0, 1.0]})
        assert run.by_seconds == [(0.0, 0.5), (20.0, 0.5), (30.0, 1.0)]
        assert run.held_out_tasks == 2

    def test_survives_its_file(self, tmp_path: Path):
        run = a_run()
        run.write(tmp_path / "run.json")
        assert Run.read(tmp_path / "run.json") == run
        assert [file.name for file in tmp_path.iterdir()] == ["run.json"]

    def test_the_table_says_how_many_never_got_there(self):
        runs = [a_run(seed=0), a_run(seed=1, rewards=(0.4, 0.5, 0.75), pace=20.0)]
        [row] = [line for line in table(runs).splitlines() if line.startswith("| TRL")]
        assert "25, 1 of 2 never" in row
        assert "50, 1 of 2 never" in row, "CPU-seconds, too"
        assert "15.0 (10.0 to 20.0)" in row

    @pytest.mark.slow
    def test_publishing_writes_page_picture_and_data_without_paths(self, tmp_path: Path):
        (tmp_path / "comparison.md").write_text(
            "before\n<!-- comparison: begin -->\nold\n<!-- comparison: end -->\nafter\n"
        )
        publish([a_run(tools=0.05), a_run("lightning", pace=4.0)], tmp_path)
        page = (tmp_path / "comparison.md").read_text()
        assert page.startswith("before\n")
        assert page.endswith("after\n")
        assert "old" not in page
        assert "trl 1.0" in page
        assert (
            page.index("answer at once") < page.index("| lightning |") < page.index("take 50 ms") < page.index("| TRL")
        )
        assert (tmp_path / "comparison-1.svg").read_text().count("<path") > 4
        data = (tmp_path / "data" / "comparison.json").read_text()
        assert [run["arm"] for run in json.loads(data)["runs"]] == ["trl", "lightning"]
        assert "somewhere" not in data


class TestPage:
    def test_markers_that_are_missing_are_named(self, tmp_path: Path):
        page = tmp_path / "page.md"
        page.write_text("<!-- this: begin -->\n")
        with pytest.raises(ValueError, match="no place for 'this'"):
            replace_table(page, "this", "text")
        assert page.read_text() == "<!-- this: begin -->\n"


class TestFiles:
    def test_setting_and_report_survive_their_files(self, tmp_path: Path):
        setting = Setting(
            "tiny",
            "m",
            "float32",
            1,
            1,
            8,
            1e-3,
            3,
            (0.9, 0.95),
            1e-8,
            0.0,
            1.0,
            0.2,
            0.28,
            0.05,
            [[("a", 1), ("b", 2)]],
        )
        setting.write(tmp_path / "setting.json")
        assert Setting.read(tmp_path / "setting.json") == setting
        assert setting.described()["tasks_per_step"] == 2
        report = Report(1.0, [Step(1, 2.0, 0.5, "w")], {"trl": "1"})
        report.write(tmp_path / "report.json")
        assert Report.read(tmp_path / "report.json") == report


class TestMeter:
    def test_children_that_ended_still_count(self, tmp_path: Path):
        burn = "import time\nwhile time.process_time() < 0.2: pass"
        child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
        before = time.time()
        meter, began = run_watched([sys.executable, "-S", "-c", child], env=os.environ, log=tmp_path / "log")
        assert before <= began <= time.time()
        assert 0.2 <= meter.cpu[-1] == meter.at(meter.times[-1])
        assert meter.cpu == sorted(meter.cpu)

    def test_a_failure_shows_the_end_of_the_log(self, tmp_path: Path):
        with pytest.raises(RuntimeError, match=r"ended with 3(.|\n)*the reason"):
            run_watched(
                [sys.executable, "-S", "-c", "print('the reason'); raise SystemExit(3)"],
                env=os.environ,
                log=tmp_path / "log",
            )

    def test_reads_what_a_living_child_uses(self):
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        with Meter(os.getpid()) as meter:
            spent = time.process_time() + 0.05
            while time.process_time() < spent:
                pass
        child.communicate(b"\n")
        assert meter.cpu[-1] - meter.cpu[0] >= 0.03


class TestVariants:
    @pytest.mark.parametrize("name", sorted(VARIANTS))
    def test_every_variant_can_be_built(self, name: str):
        algorithm = build(VARIANTS[name], ADemo())
        assert algorithm.group_size == 4

    def test_a_name_nobody_registered_is_told_before_anything_runs(self):
        with pytest.raises(PluginError, match="no-such"):
            build(Variant("no-such", {}, ""), ADemo())
        with pytest.raises(PluginError, match="nobody"):
            build(Variant("grpo", {"credit": "nobody"}, ""), ADemo())
        with pytest.raises(ConfigError, match="has no argument 'colour'"):
            build(Variant("grpo", {"colour": "red"}, ""), ADemo())

    def test_own_variants_are_built_from_text(self):
        name, variant = parse("bold=grpo,credit=gigpo,entropy_coefficient=0.01,dynamic_sampling=true")
        assert name == "bold"
        assert variant.arguments == {"credit": "gigpo", "entropy_coefficient": 0.01, "dynamic_sampling": True}
        assert build(variant, ADemo()).entropy_coefficient == 0.01

    @pytest.mark.parametrize("text", ["bold", "bold=", "=grpo", "grpo=grpo", "bold=grpo,credit"])
    def test_what_is_no_definition_is_refused(self, text: str):
        with pytest.raises(ConfigError, match="is no variant"):
            parse(text)

    def test_chosen_are_the_named_ones_and_the_own_ones(self):
        assert list(choose(["grpo", "bold", "grpo"], ["bold=rloo"])) == ["grpo", "bold"]
        with pytest.raises(ConfigError, match="no variant 'grop'"):
            choose(["grop"], [])


class TestTables:
    def test_runs_are_compared_with_the_base_of_the_same_seed(self):
        base = [a_result(seed=0, after=0.8), a_result(seed=1, after=0.6)]
        mine = [a_result("rloo", 0, 0.9), a_result("rloo", 1, 0.65), a_result("rloo", 2, 0.1)]
        assert against_base(mine, base) == "+0.075 (+0.050 to +0.100)"
        assert against_base(mine, []) == "-"

    def test_every_suite_that_was_run_has_a_table_with_the_untrained_policy(self):
        text = tables([a_result(), a_result("rloo", after=0.7), a_result("bold", after=0.9)])
        assert "### `tiny`: low level" in text
        assert "### `tiny`: own" in text
        assert "### `tiny`: credit" not in text
        assert text.count("| untrained, 3 evaluations | | 0.300 ± 0.000 |") == 2
        assert "9 ok" in text

    def test_how_far_trainer_and_sampler_were_apart_is_told_by_variant(self):
        measured = [
            replace(a_result(seed=seed), mismatch={"masked_share": 0.002, "ess": 0.9 + seed / 10}) for seed in (0, 1)
        ]
        text = tables([*measured, replace(a_result("uncorrected"), mismatch={"masked_share": 0.0})])
        assert "### `tiny`: mismatch" in text
        assert "- `grpo`: masked_share 0.00200 ± 0.00000, ess 0.95000 ± 0.07071" in text
        assert "- `uncorrected`: masked_share 0.00000" in text
        assert "masked_share" not in tables([a_result()])

    def test_a_variant_is_compared_with_the_base_at_as_many_sampled_tokens(self):
        shuffled = replace(a_result(after=0.9), sampled=[100, 100, 100], taught=[(2, 4), (2, 4), (1, 4)])
        learnable = replace(a_result("learnable", after=0.7), sampled=[50, 50, 50], taught=[(3, 4), (3, 4), (3, 4)])
        text = tables([shuffled, learnable])
        assert "### `tiny`: order" in text
        assert "| `learnable` | 0 | 150 | 0.300 | 0.300 | 0.600 | 0.700 | 42% | 75% |" in text
        assert shuffled.held_out_at(1000) == 0.9, "the last evaluation holds from there on"
        assert "sampled tokens" not in tables([shuffled]), "one alone is not compared"

    def test_a_result_survives_its_file(self, tmp_path: Path):
        result = replace(a_result(), evaluations=[[0, 0.3]])
        result.write(tmp_path / "tiny" / "seed-0.json")
        assert Result.read(tmp_path / "tiny" / "seed-0.json") == result


def by_engine(engine: str, seed: int, after: float, gap: float | None = 1e-5) -> engines_table.Result:
    report = {
        "steps": 2,
        "before": 0.3,
        "after": after,
        "evaluations": [
            {"step": step, "reward": reward, "rollouts": 10} for step, reward in ((0, 0.3), (1, None), (2, after))
        ],
        "rewards": [0.3, 0.5],
        "failed": 0,
        "drift_tokens": 0,
        "max_logprob_gap": gap,
        "time": {"start": 40.0, "rollout": 10.0, "train": 3.0, "checkpoint": 1.0, "update": 2.0, "eval": 50.0},
    }
    settings = {"steps": 2, "held_out": 10, "eval_every": 1, "set": ["engine.lr=1e-3"]}
    return engines_table.Result(engine, seed, settings, report, {"verl": "0.9", "vllm": "-"}, 100.0, 120.0, 1.5)


class TestEngines:
    def test_an_engine_is_compared_with_torch_on_the_same_seeds(self):
        results = [by_engine("torch", 0, 0.8), by_engine("verl-2", 0, 0.9, 2e-5), by_engine("verl-2", 1, 0.7, None)]
        _, _, torch, verl = engines_table.table(results).splitlines()
        assert torch == "| torch | 1 | 0.300 | 0.800 |  | 0.400 | 8.0 | 1.50 | 2.0 | 1.0e-05 |"
        assert verl.startswith("| verl, 2 workers | 2 | 0.300 ± 0.000 | 0.800 ± 0.141 | +0.100 |")
        assert verl.endswith("| 2.0e-05 |"), "the largest that is known"
        assert results[0].curve == [(0.0, 0.3), (2.0, 0.8)]

    def test_runs_of_different_settings_are_not_tabled_together(self, tmp_path: Path):
        (tmp_path / "torch").mkdir()
        result = by_engine("torch", 0, 0.8)
        result.write(tmp_path / "torch" / "seed-0.json")
        assert engines_table.read_all(tmp_path, result.settings) == [result]
        with pytest.raises(ConfigError, match=r"torch/seed-0\.json is of a run with .*'steps': 2.*'steps': 3.*--out"):
            engines_table.read_all(tmp_path, {**result.settings, "steps": 3})

    def test_runs_without_evaluations_are_tabled(self):
        result = by_engine("torch", 0, 0.8)
        bare = replace(result, report={**result.report, "before": None, "after": None, "evaluations": []})
        assert "| torch | 1 | - | - |" in engines_table.table([bare])
        assert engines_table.note([bare]).startswith("no held-out tasks, 2 steps; set: `engine.lr=1e-3`; verl 0.9. ")

    @pytest.mark.slow
    def test_publishing_writes_page_picture_and_data(self, tmp_path: Path):
        (tmp_path / "multi-gpu.md").write_text("before\n<!-- engines: begin -->\nold\n<!-- engines: end -->\nafter\n")
        result = by_engine("torch", 0, 0.8)
        result.write(tmp_path / "seed-0.json")
        read = engines_table.Result.read(tmp_path / "seed-0.json")
        assert read == result
        other = by_engine("verl-1", 0, 0.9)
        bare = replace(by_engine("verl-2", 0, 0.9), report={**other.report, "evaluations": []})
        engines_table.publish([read, other, bare], tmp_path)
        page = (tmp_path / "multi-gpu.md").read_text()
        assert page.startswith("before\n")
        assert page.endswith("after\n")
        assert "10 held-out tasks, 2 steps; set: `engine.lr=1e-3`; verl 0.9. Failed" in page
        assert (tmp_path / "engines.svg").read_text().count("<path") > 4
        data = json.loads((tmp_path / "data" / "engines.json").read_text())
        assert [run["engine"] for run in data["runs"]] == ["torch", "verl-1", "verl-2"]
