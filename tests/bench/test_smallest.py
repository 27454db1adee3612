"""Every benchmark at a size that takes seconds: it runs, and it measures something. The numbers mean nothing.

Its own command line is run in this process, with smaller constants; a program that it starts has its own. Where a real vLLM or
a training is what is measured, the part that measures is run and the rest is put in its place.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.trainer import stack

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Size:
    """A benchmark's arguments, and constants in place of its own. `json`: it takes `--json FILE`."""

    arguments: Sequence[str] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    json: bool = True


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A benchmark silences the log of its process, changes its environment and leaves pipes to its end: the process is not its
    own here."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    logging.disable(logging.NOTSET)
    gc.collect()


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(str(HERE))
    # The comparison's own tests know its program `compare.py` by the name that its folder has for benchmarks.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(HERE / "compare")])
    if not hasattr(sys.modules.get("compare"), "__path__"):
        monkeypatch.delitem(sys.modules, "compare", raising=False)
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"bench_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its file does when it is run as a program."""
    file = Path(str(module.__file__))
    (block,) = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node)
    ]
    monkeypatch.setattr(sys, "argv", [str(file), *arguments])
    exec(compile(ast.Module(block.body, []), str(file), "exec"), module.__dict__)


def itself(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`subprocess` for a benchmark that runs itself once more: it does so in this process. Servers get one of their own."""

    def again(command: Sequence[str], **_: Any) -> SimpleNamespace:
        assert list(command[:2]) == [sys.executable, module.__file__]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run(module, command[2:], monkeypatch)
        return SimpleNamespace(stdout=out.getvalue(), returncode=0, wait=lambda: 0)

    def begun(command: Sequence[str], **how: Any) -> Any:
        return subprocess.Popen(command, **how) if how else again(command)

    return SimpleNamespace(run=again, Popen=begun, PIPE=subprocess.PIPE)


SMALLEST: dict[str, Size] = {
    "ab": Size(["--repetitions", "1"], {"SEQUENCES": 20, "SMALLEST": 0.25}),
    "apo": Size(["--seeds", "2"], {"BUDGET": 300}),
    "async": Size((), {"STEPS": 2, "TASKS_PER_STEP": 1, "GROUP": 2, "BOUNDS": (0, 1), "MEDIAN": 0.01, "LONGEST": 0.05}),
    "console": Size(["--runs", "2", "--rollouts", "8", "--steps", "2"]),
    "credit": Size(["--seeds", "2", "--groups", "2"]),
    "engine": Size((), {"REPEATS": 1, "HIDDEN": 64, "LAYERS": 1, "WORDS": 2048, "WIDE": 64}),
    "fleet": Size(["--updates", "6"], {"COUNTS": (0, 1), "PAUSE": 0.01}),
    "fresh_process": Size(["--rollouts", "2", "--rounds", "1"], {"DEMOS": ("tiny",), "WARMING": 0.2}, json=False),
    "gateway": Size((), {"CALLS": 16, "CONCURRENCIES": (4,), "STREAMS": 4, "MANY": 8, "WARM": 4, "ALONE": 2}),
    "gateway_processes": Size(
        (),
        {
            "LENGTHS": (100,),
            "CONVERSATIONS": 2,
            "TURNS": 2,
            "MORE": 10,
            "ROUNDS": 1,
            "REPLIES": 4,
            "COUNTS": (0, 1),
            "CALLS": 8,
            "AT_ONCE": 4,
            "BESIDE": 2,
            "MANY": 8,
            "MANY_ROLLOUTS": 4,
        },
    ),
    "hostile": Size(["--only", "text"]),
    "keep": Size(["--seeds", "2", "--groups", "8", "--steps", "2"]),
    "load": Size(
        ["--stores", "sqlite", "--rollouts", "16", "--calls", "200"],
        {"STREAMS": 8, "STREAM_TOKENS": 1, "ARRIVING_SECONDS": 0.5},
    ),
    "long_rollouts": Size(["--rollouts", "4", "--calls", "2", "--tokens", "2048", "--repeats", "1"]),
    "logprobs": Size(["--tokens", "64"], {"TURNS": 1}),
    "order": Size(["--seeds", "1", "--steps", "2"]),
    "prefix": Size(["--seeds", "1"], {"CALLS": (3,), "FIRST": (0.05,), "MOST": 500}),
    "postgres_notify": Size(["--seconds", "0.2", "--writers", "1", "--rounds", "1"]),
    "record_whole": Size(["--conversations", "1"], {"KINDS": {"1 call": (1, 100)}}),
    "search": Size(["--rollouts", "8", "--calls", "2"], {"POLL": 0.05}),
    "sqlite_writers": Size(
        [
            "--only",
            "writers",
            "conversations",
            "--seconds",
            "0.5",
            "--conversations",
            "2",
            "--tokens",
            "256",
            "--turns",
            "2",
        ]
    ),
    "replicas": Size((), {"BALANCED": 8, "ROLLOUTS": 16, "IN_GROUPS": 16, "UPDATES": 3, "KILLS": 1}),
    "store": Size(["--only", "rollouts"], {"ROLLOUTS": 64}),
    "store_reads": Size(["--rollouts", "200", "--steps", "8", "--step-rollouts", "8"]),
    "threads": Size((), {"TURNS": 1, "CALLS": 20}, json=False),
    "trees": Size(["--only", "start", "--rounds", "1"]),
}


def tree(module: ModuleType) -> None:
    """One shape of each kind. A peak is that of a process of its own, as ever."""
    small = module.Shape(2, 2, 64, 8, 8)
    module.STEPS, module.LONG = (small,), small
    module.PATHS, module.WIDTHS, module.PEAKS = (module.Shape(1, 1, 2016, 32, 0),), (), ("tree",)
    module.overhead = lambda model: {}
    module.subprocess = subprocess


def real(module: ModuleType) -> None:
    """A tiny model in the place of SmolLM2."""
    from lightning.testing.tiny_models import make_tiny_model

    folder = Path(str(module.FOLDER)) / "model"
    module.model_folder = lambda: folder if folder.is_dir() else make_tiny_model(folder)


def session(module: ModuleType) -> None:
    """Agents that are quick."""
    module.bench_async.MEDIAN, module.bench_async.LONGEST = 0.01, 0.05


def plan(module: ModuleType) -> None:
    """Two short runs, one after the other."""
    module.SETTINGS = {name: replace(one, steps=5, tasks_per_step=2) for name, one in list(module.SETTINGS.items())[:2]}

    async def measured(runs: Path, names: Sequence[str]) -> dict[str, Any]:
        for name in names:
            await module.make(runs, name)
        return {name: await module.read(runs / name) for name in names}

    module.measured = measured


def profile(module: ModuleType) -> None:
    """One planted bottleneck, in a short run."""
    quick = replace(module.PLANTED["few places"], steps=3, agent=lambda: module.with_tool(lambda task: 0.01))
    module.PLANTED = {"few places": quick}
    module.asked = lambda run: [{"cause": "places", "text": "", "saves": 0.5, "set": ["runner.concurrency=32"]}]


def trained(module: ModuleType) -> None:
    """A training's result in the place of a training."""
    half = {"solved": 0.5, "limit": 0.25}
    result = {"rewards": [[0, 0.25], [8, 0.5]], "seconds": 1.0, "failed": 0, "before": half, "after": half}

    def train(*arguments: Any) -> None:
        (arguments[-1] / "result.json").write_text(json.dumps(result))

    module.train = train


def policies(module: ModuleType) -> None:
    """Every part but the trainings, whose results are in their place."""
    ended = {"reward": 0.5, "rollouts": 8}
    summary = {"evaluations": [ended, ended], "time": {"rollout": 1.0}, "steps": 2}
    summary |= {"trained_tokens": 64, "drift_tokens": 0, "failed": 0}
    result = {"summary": summary, "shares": {}, "base_gap": 0.0, "trainer_mb": 500.0, "vllm_mb": 1000.0}

    def train(name: str, way: str, seed: int, folder: Path) -> None:
        (folder / "result.json").write_text(json.dumps(result))

    module.train = train


def started(module: ModuleType) -> None:
    """A vLLM that says how it was started."""

    async def start(model: Path, log: Path) -> float:
        log.write_text("" if os.environ["VLLM_WORKER_MULTIPROC_METHOD"] else module.COPIED)
        sum(range(1_000_000))
        return 1.0

    module.start = start
    module.measure = lambda kind, model, folder, measure=module.measure: (measure(kind, model, folder)[0], 1.0)


QUICK = {"MEDIAN": 0.01, "LONGEST": 0.02, "DELAY": 0.005, "TOKEN_DELAY": 0.001, "TRAIN": 0.02, "UPDATE": 0.01}
PREPARED: dict[str, tuple[Size, Callable[[ModuleType], None]]] = {
    "adapters": (Size(["raw"], {"TURNS": 1, "RUNS": 1, "CALLS": 1}), lambda module: None),
    "tree": (Size((), {"REPEATS": 1, "LAYERS": 1, "TRL": Path("no such")}), tree),
    "real": (
        Size(["--only", "step", "--dtype", "float32", "--threads", "1"], {"MATRIX": 64, "GROUPS": 1, "STEPS": 1}),
        real,
    ),
    "plan": (Size((), QUICK | {"SEEDS": 2, "BATCH": 2}), plan),
    "profile": (Size((), {"DELAY": 0.005, "TOKEN_DELAY": 0.001}), profile),
    "distill": (Size(["--seeds", "1"], json=False), trained),
    "policy_fault": (Size(["--seeds", "1"], json=False), trained),
    "policies": (
        Size(["--seeds", "1"], {"UPDATES": 3, "ROLLOUTS": 8, "TURNS": 2, "CALLS": 16, "ROUNDS": 1}),
        policies,
    ),
    "session": (Size((), {"STEPS": 2}), session),
    "vllm_start": (Size(["--rounds", "1"], json=False), started),
}
ELSEWHERE = {
    "real_sampling": "test_sampling_reaches_a_real_vllm",
    "masks": "tests/plugins/masks/test_real_vllm.py asks a real vLLM for the same masks",
    "console_page": "needs a browser: `make browser` draws the same page",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [*SMALLEST, *PREPARED])
def test_a_benchmark_runs_at_its_smallest_size(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_SECONDS", "0.05")  # which the programs that it starts read, too
    module = load(name, monkeypatch)
    size, prepare = PREPARED.get(name, (SMALLEST.get(name), None))
    assert size is not None
    for constant, value in size.constants.items():
        assert hasattr(module, constant)
        monkeypatch.setattr(module, constant, value)
    monkeypatch.chdir(tmp_path)
    if prepare is not None:
        monkeypatch.setattr(
            "lightning.trainer.stack.make_policy_server", stack.make_policy_server
        )  # put back at the end
        monkeypatch.setattr(module, "FOLDER", tmp_path, raising=False)
        monkeypatch.setattr(module, "subprocess", itself(module, monkeypatch), raising=False)
        prepare(module)
    out = tmp_path / "out.json"
    run(module, [*(["--json", str(out)] if size.json else []), *size.arguments], monkeypatch)
    assert capsys.readouterr().out.strip(), "it says what it measured"
    assert not size.json or json.loads(out.read_text())


def test_a_row_of_the_other_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("hostile", monkeypatch)
    for asked in (["--recording", "--only", "values"], ["--only", "texts"]):
        with pytest.raises(SystemExit, match="2"):
            run(module, asked, monkeypatch)
        assert f"--only has '{asked[-1]}', and there are: " in capsys.readouterr().err


def test_no_benchmark_is_without_a_smallest_size() -> None:
    names = {file.stem.removeprefix("bench_") for file in HERE.glob("bench_*.py")}
    assert names == {*SMALLEST, *PREPARED, *ELSEWHERE}


@pytest.mark.slow
async def test_sampling_reaches_a_real_vllm(served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also its control routes, which answer their owner alone."""
    module = load("real_sampling", monkeypatch)
    for name, value in {"TASKS": 1, "GROUP": 2, "PASSES": 1}.items():
        monkeypatch.setattr(module, name, value)

    async def agent(task: Any, llm: Any) -> None:
        async with module.client() as http:
            body = {"model": llm.model, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            await module.post(http, llm.base_url.removesuffix("/v1"), body, llm.api_key)

    monkeypatch.setattr(module, "agent", agent)
    rollouts, mine = await module.ours(served.first, tmp_path, served.vllm)
    assert [[call.tokens for call in calls] for calls in rollouts] == [[4], [4]]
    assert mine["wall"] > 0


def test_the_docs_name_commit_and_machine_of_every_section() -> None:
    text = (HERE.parents[1] / "docs" / "benchmarks.md").read_text()
    beginning, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert "x86-64 cores" in beginning, "the machine of all that name no other"
    assert len(sections) > 10
    assert not [each.partition("\n")[0] for each in sections if not re.search(r"\b[0-9a-f]{8}\b", each)]
    assert set(load_about()) >= {"commit", "cpu", "cores"}


def load_about() -> dict[str, Any]:
    """What `run.py` writes beside the numbers."""
    spec = importlib.util.spec_from_file_location("bench_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.about()
    return found
