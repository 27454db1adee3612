"""What `lightning profile` says of runs whose bottleneck was planted, beside what the cure then gains.

Each bottleneck is a run by the real `Trainer`, with gateway, store and the torch engine on a tiny model; the policy server is
scripted. What costs time sleeps instead of computing. The same run is made beside it with the cure that a practitioner would
apply; the gain is the share of a step's wall time that this saves, from the first step's commit to the last one's, with
the evaluations between. Then `lightning profile` is asked about the first run alone: is the bottleneck named first, and how
far off is the gain that it predicts from that of the very settings that it proposes (a third run, where they are not the cure)?
The causes and the words that must name them were written down before the profiler's rules were known.

    python tests/bench/bench_profile.py [--json FILE] [--only NAME ...] [--runs FOLDER]

Five minutes, mostly waiting. `--runs` keeps the runs, and what has finished there is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import lightning
from lightning.config import Config, with_settings
from lightning.config.load import parse_value
from lightning.policy_server.protocol import Probe, Update, Usage
from lightning.testing import FakeVLLM, Reply, ToolCall, vllm_replies
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import Trainer, stack
from lightning.types import LLM, Task

GROUP, VOCABULARY = 4, 320
DELAY, TOKEN_DELAY = 0.08, 0.01
"""Seconds of a call until its first token, and between two of them."""
DONE, RUN = "seconds.json", "run"
TARGET = 0.25
"""How far off the median prediction may be, as a share of what was measured."""

Agent = Callable[[Task, LLM], Any]


@dataclass(frozen=True)
class Planted:
    """A run with a bottleneck. `cure` are `KEY=VALUE` settings; without any the agent of `cured` is the cure. `named` is the
    regular expression that must be found in cause, text and settings of the first thing that is said to help."""

    what: str
    agent: Callable[[], Agent]
    named: str
    settings: dict[str, Any] = field(default_factory=dict)
    cure: tuple[str, ...] = ()
    cured: Callable[[], Agent] | None = None
    runner: str = "inline"
    steps: int = 6
    held_out: int = 0


@dataclass(frozen=True)
class Found:
    """One bottleneck: seconds of a step, sick and cured; what was named first and predicted, and what that gained."""

    name: str
    sick: float
    cured: float
    gain: float
    said: str = ""
    named: bool = False
    proposed: tuple[str, ...] = ()
    predicted: float | None = None
    measured: float | None = None
    error: float | None = None


# agents --------------------------------------------------------------------------------------------------------------
def answer(body: Any) -> Reply:
    """One tool call, then words."""
    if any(message["role"] == "tool" for message in body["messages"]):
        return Reply("so it is what it is", delay=DELAY, token_delay=TOKEN_DELAY)
    return Reply("", tool_calls=[ToolCall("look", "{}")], delay=DELAY, token_delay=TOKEN_DELAY)


def with_tool(seconds: Callable[[Task], float]) -> Agent:
    """An agent that looks something up, which takes so long, and then answers."""
    rng = random.Random(3)

    @lightning.tool
    async def look(pause: float) -> str:
        await asyncio.sleep(pause)
        return "done"

    async def agent(task: Task, llm: LLM) -> float:
        said: list[dict[str, Any]] = [{"role": "user", "content": str(task.input)}]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            while True:
                body = {"model": llm.model, "messages": said}
                async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                    reply.raise_for_status()
                    message = (await reply.json())["choices"][0]["message"]
                if not message.get("tool_calls"):
                    return float(rng.random() < 0.5)
                said.append(message)
                found = await look(seconds(task))
                said += [
                    {"role": "tool", "tool_call_id": call["id"], "content": found} for call in message["tool_calls"]
                ]

    return agent


def quick() -> Agent:
    """Its tool takes a second, more or less."""
    rng = random.Random(5)
    return with_tool(lambda task: rng.uniform(0.9, 1.1))


def slow() -> Agent:
    """Its tool takes four seconds."""
    rng = random.Random(5)
    return with_tool(lambda task: rng.uniform(3.9, 4.1))


def one_slow_sibling() -> Agent:
    """One rollout of each group waits seven times as long for its tool as the others."""
    seen: Counter[str] = Counter()

    def seconds(task: Task) -> float:
        seen[task.id] += 1
        return 4.0 if seen[task.id] % GROUP == 1 else 0.6

    return with_tool(seconds)


def with_index() -> Agent:
    """Loads an index into its process, once for each, before it asks."""
    return indexed


LOADED: list[str] = []
"""The index, in a process that has loaded it."""


def index() -> list[str]:
    """What takes most of a second to load."""
    if not LOADED:
        time.sleep(0.9)
        LOADED.append("found")
    return LOADED


def indexed(task: Task, llm: LLM) -> float:
    """Ask once, with what the index has."""
    said = [
        {"role": "user", "content": f"{task.input} {index()[0]}"},
        {"role": "tool", "content": "", "tool_call_id": "x"},
    ]
    body = json.dumps({"model": llm.model, "messages": said}).encode()
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{llm.base_url}/chat/completions", body, headers)) as reply:
        json.load(reply)
    return random.random()


PLANTED = {
    "few places": Planted(
        "32 rollouts of a step, which only wait, have 8 places",
        quick,
        r"concurren|places|slots|queue|rollouts at (once|a time)",
        {"trainer.tasks_per_step": 8, "runner.concurrency": 8},
        ("runner.concurrency=32",),
    ),
    "frequent evaluation": Planted(
        "32 held-out tasks are run after every step",
        quick,
        r"eval|held.?out",
        {"trainer.tasks_per_step": 4, "runner.concurrency": 16, "trainer.eval_every": 1},
        ("trainer.eval_every=4",),
        steps=9,
        held_out=32,
    ),
    "stragglers": Planted(
        "one rollout of each group takes far longer than the others, and all wait for it",
        one_slow_sibling,
        r"straggl|slowest|staleness|longest|last rollout|\btail\b|slow rollouts",
        {"trainer.tasks_per_step": 4, "runner.concurrency": 64},
        ("trainer.max_staleness=2",),
        steps=10,
    ),
    "fresh processes": Planted(
        "each rollout is a process of its own, which loads an index for 0.9 s first",
        with_index,
        r"process|set.?up|fork|initiali|import|start.?up",
        {"trainer.tasks_per_step": 4, "runner.concurrency": 16},
        ("runner.rollouts_per_process=64",),
        runner="process",
    ),
    "slow tools": Planted(
        "a tool takes four seconds of each rollout, which has a place of its own",
        slow,
        r"\btools?\b",
        {"trainer.tasks_per_step": 4, "runner.concurrency": 32},
        cured=quick,
    ),
}


# runs ----------------------------------------------------------------------------------------------------------------
class Scripted:
    """A policy server that is scripted, and takes weights as if it loaded them."""

    version, models, claim = 0, (), ""

    def __init__(self) -> None:
        self.fake = FakeVLLM(script=answer)
        self.url, self.model, self.alias = "", self.fake.model, self.fake.model

    async def start(self) -> None:
        """Listen."""
        await self.fake.start()
        self.url = self.fake.url

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        """Calls in flight stand still for a moment."""
        self.fake.pause()
        in_flight = self.fake.in_flight()
        await asyncio.sleep(0.05)
        self.version = version
        self.fake.resume()
        return Update(version, in_flight)

    async def usage(self) -> Usage:
        """It does not count."""
        return Usage()

    async def wait_died(self) -> None:
        """Never."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop listening."""
        await self.fake.close()


def make(folder: Path, planted: Planted, settings: tuple[str, ...], *, cured: bool) -> None:
    """One run, with further settings, in this process; the seconds of its steps go to its folder."""
    vllm_replies.VOCABULARY = VOCABULARY
    stack.make_policy_server = lambda *_, **__: Scripted()  # type: ignore[attr-defined, assignment]
    model = make_tiny_model(folder / "tiny", vocab=VOCABULARY)
    common = {"trainer.max_logprob_gap": 1e9, "trainer.eval_every": 0, "trainer.steps": planted.steps}
    given = {key: parse_value(text, "--set") for key, _, text in (each.partition("=") for each in settings)}
    config = with_settings(Config(), common | planted.settings | given)
    agent = (planted.cured if cured and planted.cured else planted.agent)()
    algorithm = f"grpo:group_size={GROUP},correction.kind=none"
    trainer = Trainer(model, algorithm, runner=planted.runner, config=config, out=folder / RUN, progress=False)
    held_out = [Task(f"held-out question {number}") for number in range(planted.held_out)]
    trainer.fit(agent, [Task(f"question {number}") for number in range(64)], held_out)

    async def commits() -> list[float]:
        store = trainer.open_store()
        await store.open()
        try:
            return [record.at for record in await store.steps(trainer.run_id, brief=True)]
        finally:
            await store.close()

    first, *_, last = found = asyncio.run(commits())
    (folder / DONE).write_text(json.dumps((last - first) / (len(found) - 1)))


@dataclass(frozen=True)
class Pair:
    """The sick run's folder, and seconds of a step, of that run and of the one that was made beside it."""

    run: Path
    sick: float
    other: float

    @property
    def gain(self) -> float:
        """The share of the sick run's wall time that the other saves."""
        return 1 - self.other / self.sick


def pair(runs: Path, name: str, settings: tuple[str, ...]) -> Pair:
    """The sick run, and beside it, at the same time, one with these settings (none: with the cured agent): a machine that does
    other things as well slows both. Each is a process of its own; what is there is not made again."""
    which = hashlib.sha256(repr((name, settings)).encode()).hexdigest()[:8]
    folders = [runs / f"{name.replace(' ', '-')}-{which}-{kind}" for kind in ("sick", "other")]
    if not all((folder / DONE).is_file() for folder in folders):
        further = [word for each in settings for word in ("--set", each)] or ["--cured"]
        made = []
        for folder, words in zip(folders, ([], further), strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, __file__, "--make", name, "--runs", str(folder), *words]
            made.append(subprocess.Popen(command))
        if failed := [code for code in [process.wait() for process in made] if code]:
            raise RuntimeError(f"a run of {name!r} failed with {failed}: see above")
    sick, other = (float(json.loads((folder / DONE).read_text())) for folder in folders)
    return Pair(folders[0] / RUN, sick, other)


def asked(run: Path) -> list[dict[str, Any]] | str:
    """What `lightning profile` says would help, most first; a text where it does not answer."""
    command = [sys.executable, "-m", "lightning", "profile", str(run), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        helps = json.loads(done.stdout)["helps"]
    except (ValueError, KeyError):
        told = done.stderr + done.stdout
        if "No such command" in told:
            return "this lightning has no command `profile`"
        return " ".join(told.split())[-300:]
    return list(helps)


def judged(runs: Path, name: str) -> Found:
    """One bottleneck: measured sick and cured, then profiled."""
    planted = PLANTED[name]
    first = pair(runs, name, planted.cure)
    so_far = Found(name, first.sick, first.other, first.gain)
    helps = asked(first.run)
    if isinstance(helps, str):
        return replace(so_far, said=f"no answer: {helps}")
    if not helps:
        return replace(so_far, said="nothing helps")
    best = helps[0]
    proposed = tuple(best.get("set") or ())
    said = " ".join((str(best["cause"]), str(best["text"]), *proposed))
    named, predicted = bool(re.search(planted.named, said, re.IGNORECASE)), float(best["saves"])
    so_far = replace(so_far, said=said, named=named, proposed=proposed, predicted=predicted)
    if not proposed:  # what no setting cures cannot be tried
        return so_far
    real = first.gain if set(proposed) == set(planted.cure) else pair(runs, name, proposed).gain
    return replace(so_far, measured=real, error=abs(predicted - real) / abs(real) if real else None)


def line(found: Found) -> str:
    """What is printed of one."""
    planted = PLANTED[found.name]
    cure = " ".join(planted.cure) or "a faster agent"
    lines = [
        f"{found.name}: {planted.what}",
        f"  a step {found.sick:.2f} s, with {cure} {found.cured:.2f} s: gain {found.gain:.0%}",
        f"  profile: {found.said}" + (" (named)" if found.named else " (NOT named)"),
    ]
    if found.predicted is not None:
        lines.append(f"  predicted {found.predicted:.0%}, set {' '.join(found.proposed) or 'nothing'}")
    if found.measured is not None and found.error is not None:
        lines[-1] += f": measured {found.measured:.0%}, error {found.error:.0%}"
    return "\n".join(lines)


def main(runs: Path, out: Path | None, only: list[str]) -> None:
    """All of them; print each as it is known, then the median error."""
    found = []
    for name in only or PLANTED:
        found.append(judged(runs, name))
        sys.stdout.write(line(found[-1]) + "\n")
        sys.stdout.flush()
    errors = [each.error for each in found if each.error is not None]
    text = (
        f"median error {median(errors):.0%} of {len(errors)} (target {TARGET:.0%})"
        if errors
        else "nothing was predicted"
    )
    sys.stdout.write(f"named first: {sum(each.named for each in found)} of {len(found)}; {text}\n")
    if out is not None:
        out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", nargs="*", default=[], choices=[*PLANTED], help="only these")
    parser.add_argument("--runs", type=Path, help="folder in which the runs are kept")
    parser.add_argument("--make", choices=[*PLANTED], help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--cured", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        where = given.runs or Path(scratch)
        if given.make:
            make(where, PLANTED[given.make], tuple(given.set), cured=given.cured)
        else:
            main(where, given.json, given.only)
