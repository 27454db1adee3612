"""What an adapter costs for each model call: the same agent without lightning, under the tap alone, and with its adapter.

The agents are the solvers of the adapters' contract tests (two model calls and one tool run each), a client of their own for
every run, against the gateway and a scripted policy server in another process. CPU is what the agents' process used (user +
system), so neither the servers nor a busy machine count. The three take turns in short blocks, and the difference is the
median over the turns.

    python tests/bench/bench_adapters.py [--json FILE] [adapter ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import gc
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from lightning.instrument import activate, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import AdapterContract
from lightning.testing.contract_house import House
from lightning.testing.contract_script import ANSWER
from lightning.types import LLM

HERE = Path(__file__).parent
CONTRACTS = HERE.parent / "adapters"
TURNS, RUNS, CALLS = 15, 5, 2
KINDS = ("none", "tap", "ours")
LEASES = TURNS * RUNS * len(KINDS) + 3 * len(KINDS)


def serve() -> None:
    """Be the servers: say who may call, then wait for the end of the input."""
    house = House()
    house.start()
    llms = [house.lease()[1] for _ in range(LEASES)]
    said = {"base_url": llms[0].base_url, "model": llms[0].model, "keys": [llm.api_key for llm in llms]}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    house.close()


@contextlib.contextmanager
def servers() -> Iterator[Iterator[LLM]]:
    """The servers, in a process of their own, and the rollouts that may call them."""
    command = [sys.executable, __file__, "--role", "servers"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield (LLM(said["base_url"], key, said["model"]) for key in said["keys"])
        process.stdin.close()


def contract(folder: str) -> AdapterContract:
    """The contract of an adapter's tests."""
    file = CONTRACTS / folder / "test_contract.py"
    spec = importlib.util.spec_from_file_location(f"contract_{folder}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, AdapterContract)]
    return next(item for item in found if item is not AdapterContract)()


@contextlib.contextmanager
def installed(kind: str, adapter: str) -> Iterator[Callable[[LLM], contextlib.AbstractContextManager[object]]]:
    """What is measured, around the agents; yields what goes around each of them."""
    with contextlib.ExitStack() as undoing:
        if kind == "none":
            yield lambda _: contextlib.nullcontext()
            return
        undoing.callback(install_tap())
        undoing.callback(plugins().install_adapters(emit, [adapter] if kind == "ours" else []))
        yield activate


def block(subject: AdapterContract, kind: str, llms: Iterator[LLM], loop: asyncio.Runner, runs: int) -> float:
    """CPU milliseconds for each model call of `runs` runs."""

    async def one(around: Callable[[LLM], contextlib.AbstractContextManager[object]]) -> None:
        llm = next(llms)
        with around(llm):
            answer = await subject.run(subject.solver(llm), "hi")
        assert ANSWER in answer, answer

    with installed(kind, subject.adapter) as around:
        gc.collect()
        began = time.process_time()
        for _ in range(runs):
            loop.run(one(around), context=contextvars.copy_context())
        return (time.process_time() - began) / (runs * CALLS) * 1e3


def measure(folder: str) -> dict[str, Any]:
    """One adapter."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    subject = contract(folder)
    turns: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with servers() as llms, asyncio.Runner() as loop, tempfile.TemporaryDirectory() as empty:
        os.environ.pop("SSL_CERT_FILE", None)
        os.environ["SSL_CERT_DIR"] = empty  # certificates that nobody needs here would cost more than all else
        for kind in KINDS:
            block(subject, kind, llms, loop, 3)
        for _ in range(TURNS):
            for kind in KINDS:
                turns[kind].append(block(subject, kind, llms, loop, RUNS))
    added = {
        kind: median(ours - none for ours, none in zip(turns[kind], turns["none"], strict=True)) for kind in KINDS[1:]
    }
    cpu = {f"cpu_ms_{kind}": median(turns[kind]) for kind in KINDS}
    return {"adapter": subject.adapter, **cpu, "added_ms_tap": added["tap"], "added_ms_ours": added["ours"]}


def main(out: Path | None, wanted: list[str]) -> dict[str, Any]:
    """Measure every adapter in a process of its own, print a table, and write the numbers to `out`."""
    results: dict[str, Any] = {"calls": TURNS * RUNS * CALLS}
    sys.stdout.write(f"{'CPU for each model call, ms':<28}{'none':>9}{'tap':>9}{'ours':>9}{'added':>9}\n")
    for file in sorted(CONTRACTS.glob("*/test_contract.py")):
        folder = file.parent.name
        if wanted and folder not in wanted:
            continue
        command = [sys.executable, __file__, "--role", folder]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{folder}: {ran.stderr}")
        found = results[folder] = json.loads(ran.stdout.splitlines()[-1])
        cells = (*(found[f"cpu_ms_{kind}"] for kind in KINDS), found["added_ms_ours"])
        sys.stdout.write(f"{found['adapter']:<28}" + "".join(f"{cell:>9.2f}" for cell in cells) + "\n")
        sys.stdout.flush()
    if out is not None:
        out.write_text(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("adapters", nargs="*", help="folders of tests/adapters; none measures all")
    arguments = parser.parse_args()
    if arguments.role == "servers":
        serve()
    elif arguments.role:
        sys.stdout.write(json.dumps(measure(arguments.role)) + "\n")
    else:
        main(arguments.json, arguments.adapters)
