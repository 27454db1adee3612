"""Traces one model call from the socket to the durable row: which modules it enters, and how many functions of each. With
`--train` traces `lightning train` instead, from its arguments to the first optimizer step, in the trainer's own process.

    python tests/house/journey.py [--train] [--functions]

A gateway over SQLite answers calls of a fake vLLM and records their texts; every default plugin is loaded. The first call fills
caches and opens connections; the second is traced in all threads. Modules are those of the core, the plugins and the adapters;
what else is entered (the fake, clients, libraries) is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import inspect
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

import httpx
from lightning.cli.app import main as run_command
from lightning.config.plugin_settings import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.plugins import plugins
from lightning.store.sqlite import SqliteStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import Rollout, Run, Task

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "lightning"
PACKAGES = (CORE, *(folder for place in ("plugins", "adapters") for folder in (ROOT / place).glob("*/lightning_*")))
MODEL = ROOT / "examples/lightning_examples/raw_python/model"
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


def module_of(file: Path) -> str:
    """A file of a package as `room/module`, a plugin's or an adapter's below the package's name; empty for any other file."""
    package = next((package for package in PACKAGES if file.is_relative_to(package)), None)
    if package is None or file.is_relative_to(CORE / "testing"):
        return ""
    return str(file.relative_to(package if package == CORE else package.parent).with_suffix(""))


def rooms(modules: Iterable[str]) -> dict[str, int]:
    """How many modules of each room there are, by the room's name."""
    return dict(
        sorted(collections.Counter(name.rpartition("/")[0].partition("/")[0] or "." for name in modules).items())
    )


class Trace:
    """The functions that were entered while it is on, in order; `install` it before the threads begin."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[CodeType, None] = {}

    def install(self) -> None:
        """Listen in this thread and in all that begin from now on."""
        threading.setprofile(self._heard)
        sys.setprofile(self._heard)

    def modules(self) -> dict[str, list[str]]:
        """Module -> its functions that were entered, both in the order of their first entry. A class body is no function."""
        found: dict[str, list[str]] = {}
        for code in self.entered:
            if (
                code.co_flags & inspect.CO_OPTIMIZED
                and "<" not in code.co_name
                and (name := module_of(Path(code.co_filename)))
            ):
                found.setdefault(name, []).append(code.co_qualname)
        return found

    def _heard(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            self.entered.setdefault(frame.f_code)


async def model_call(folder: Path) -> dict[str, list[str]]:
    """The modules that a model call enters, with its functions."""
    trace = Trace()
    plugins().plugins()
    trace.install()
    store = SqliteStore(folder / "store.db")
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(id="rollout", run="run", task=Task(input="hello"), group="group")])
    (lease,) = await store.lease("run", "worker")
    async with FakeVLLM() as fake:
        gateway = Gateway(
            store,
            [Upstream(fake.url, fake.model)],
            GatewayConfig(record_requests=True),
            secret=b"of the trace, and long enough",
        )
        await gateway.start()
        llm = gateway.llm(lease)
        headers = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(base_url=llm.base_url, headers=headers) as client:
            for trace.on in (False, True):
                answer = await client.post("chat/completions", json=BODY)
                assert answer.status_code == httpx.codes.OK, answer.text
            trace.on = False
        await gateway.close()
    recorded = await store.transitions("rollout")
    assert len(recorded) == 2, "what is traced was recorded"
    await store.close()
    return trace.modules()


AGENT = """
import httpx


def agent(task, llm):
    body = {"model": llm.model, "messages": [{"role": "user", "content": task.input}], "max_tokens": 8}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {llm.api_key}"})
    return float(len(reply.json()["choices"][0]["message"]["content"]))
"""


class UntilTrained(Trace):
    """A trace that ends when the loop takes the step that the engine has computed."""

    def _heard(self, frame: FrameType, event: str, argument: object) -> None:
        self.on = self.on and frame.f_code.co_qualname != "Loop.take"
        super()._heard(frame, event, argument)


def first_step(folder: Path) -> dict[str, list[str]]:
    """The modules that a training enters, with its functions, up to its first optimizer step: with a real vLLM, and an engine
    that trains the demonstration's model."""
    (folder / "journey_agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(f'{{"input": "{number} + 1"}}\n' for number in range(4)))
    sys.path.insert(0, str(folder))
    trace = UntilTrained()
    trace.install()
    trace.on = True
    arguments = ["train", "journey_agent:agent", "--model", str(MODEL), "--tasks", str(folder / "tasks.jsonl")]
    arguments += [
        "--out",
        str(folder / "run"),
        "--steps",
        "1",
        "--tasks-per-step",
        "2",
        "--algorithm",
        "grpo:group_size=4",
    ]
    with suppress(SystemExit):
        run_command(arguments)
    assert not trace.on, "the step was taken"
    return trace.modules()


def main() -> None:
    """Print the modules in the order in which they are entered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print the functions as well")
    parser.add_argument("--train", action="store_true", help="trace a training up to its first optimizer step")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = first_step(Path(folder)) if given.train else asyncio.run(model_call(Path(folder)))
    for module, functions in found.items():
        sys.stdout.write(f"{len(functions):4} {module}{' ' + ' '.join(functions) if given.functions else ''}\n")
    sys.stdout.write("".join(f"{count:4} of {room}\n" for room, count in rooms(found).items()))
    sys.stdout.write(f"{len(found)} modules, {sum(map(len, found.values()))} functions\n")


if __name__ == "__main__":
    main()
