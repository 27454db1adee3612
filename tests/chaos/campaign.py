"""`kill -9`, again and again, of everything that takes part in a real run of the demonstration's agent.

    make chaos                                       # 60 kills over Postgres, about ten minutes
    make chaos ARGS="--store redis --kills 1000"     # hours; --store sqlite, postgres or redis; --seed repeats the order
    make chaos ARGS="--kills 1000 --storm"           # less than an hour: kills do not wait until the last one is made good

A trainer with a server and a real vLLM, a second server, several clients and the database run as processes of their own. One of
them is killed, and started again as a supervisor would; when it serves again, the next. In a storm another that serves is
killed a moment later, so that many are away at once. At the end the trainer goes on to one more committed step, everything
is stopped, and the store is compared with what the agents saw with their own eyes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil
from lightning.algorithms.lightning_rl import LightningRL
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.types import Scope
from lightning_examples.raw_python import MODEL
from lightning_server.auth import issue_token
from lightning_server.tokens import put_token

from tests.chaos.agent import tasks as word_problems
from tests.chaos.databases import DATABASES, Database
from tests.chaos.journal import Journal, Line
from tests.chaos.services import Service
from tests.chaos.verdict import Verdict, judge
from tests.servers.ports import free_port

ROOT = Path(__file__).parents[2]
AGENT = "tests.chaos.agent:agent"
SERVING = "lightning.policy_server.launch"
RUNNERS, AGENTS = 3, 4
LONGEST_RECOVERY = 180.0
"""Seconds after which something that was killed counts as not coming back."""
WEIGHTS = {"agent": 3, "runner": 6, "server": 4, "database": 4, "trainer": 1, "policy server": 1}
"""How often each is killed, beside the others: a trainer and a vLLM take half a minute to start."""
STORM = {"agent": 12, "runner": 4, "server": 3, "database": 5, "trainer": 0.3, "policy server": 0.3}
"""The same in a storm."""
MODEL_SERVERS = {"trainer", "policy server"}
"""Without either no agent is answered for half a minute: a storm kills one of them only when both serve."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: of what, when (Unix seconds), and the seconds until it served again (None: it did not)."""

    target: str
    at: float
    recovered: float | None


@dataclass(frozen=True, slots=True)
class Awaited:
    """What was killed `at`, was started again at `restarted`, and serves when a line of the journal after that is `back`."""

    target: str
    name: str
    at: float
    restarted: float
    back: Callable[[Line], bool]


@dataclass
class Campaign:
    """The processes of one campaign, all of whose files are in `folder`."""

    folder: Path
    database: Database
    dice: random.Random
    journal: Journal
    trainer: Service
    server: Service
    runners: Sequence[Service]
    kills: list[Kill] = field(default_factory=list)
    say: Callable[[str], None] = print

    @property
    def services(self) -> list[Service]:
        """All but the database, in the order in which they start."""
        return [self.trainer, self.server, *self.runners]

    def run(self, kills: int, seconds: float, *, storm: bool = False) -> None:
        """Kill so often, or for so long. Raises `TimeoutError` when something does not come back."""
        self.database.start()
        for service in self.services:
            service.start()
        start = Awaited("the first reply", "", time.time(), time.time(), lambda line: bool(line.reply))
        self._settle([start], patience=3 * LONGEST_RECOVERY)
        end = time.monotonic() + seconds
        weights, awaited = STORM if storm else WEIGHTS, list[Awaited]()
        targets = [target for target in weights if target != "database" or self.database.is_process]
        while len(self.kills) + len(awaited) < kills and time.monotonic() < end:
            self._idle(self.dice.expovariate(3.0) if storm else self.dice.uniform(0.2, 3.0))
            target = self.dice.choices(targets, [weights[target] for target in targets])[0]
            killed = None
            # It is waited for, if it is away: another in its place would soon be the trainer or vLLM each time.
            while killed is None and time.monotonic() < end:
                awaited = self._look(awaited)
                # Who is killed whenever it starts would let nothing happen.
                away = {one.name for one in awaited}
                killed = self._kill(target, away | (MODEL_SERVERS if away & MODEL_SERVERS else set()))
                if killed is None:
                    self._idle(0.1)
                else:
                    awaited.append(killed)
            if not storm:
                awaited = self._settle(awaited)
        self._settle(awaited, patience=3 * LONGEST_RECOVERY)

    def _settle(self, awaited: Sequence[Awaited], patience: float = LONGEST_RECOVERY) -> list[Awaited]:
        """Wait until all of them serve."""
        end = time.time() + patience
        while awaited := self._look(awaited):
            if time.time() > end:
                self._give_up(awaited)
            self.supervise()
            time.sleep(0.05)
        return list(awaited)

    def _look(self, awaited: Sequence[Awaited]) -> list[Awaited]:
        """Who of them does not serve yet; the others' recovery is noted."""
        left, lines = list(awaited), self.journal.read()
        for line in lines:
            for one in [one for one in left if line.at > one.restarted and one.back(line)]:
                left.remove(one)
                if one.name:
                    self.kills.append(Kill(one.target, one.at, line.at - one.at))
                    self.say(f"{len(self.kills):4} {one.target:14} serves again after {line.at - one.at:.1f} s")
        return left

    def _give_up(self, awaited: Sequence[Awaited]) -> None:
        logs = "\n".join(f"--- {item.name}\n{item.log.read_text(errors='replace')[-3000:]}" for item in self.services)
        raise TimeoutError(f"{', '.join(one.name or one.target for one in awaited)} did not come back\n{logs}")

    def _kill(self, target: str, away: Collection[str]) -> Awaited | None:
        """Kill one and start it again; how it is seen to serve. None: there was nothing to kill, or it is away."""
        at, back = time.time(), _replies
        runner = self.dice.choice(self.runners)
        name = {"agent": f"an agent of {runner.name}", "runner": runner.name}.get(target, target)
        if name in away:
            return None
        match target:
            case "agent":
                if self._kill_child(runner, "lightning.runner.forkserver_main") is None:
                    return None
                back = _of(runner.name)
            case "policy server":
                killed = self._kill_child(self.trainer, SERVING)
                if killed is None:
                    return None
                # What it had answered before may still arrive: only a new one shows that it serves.
                back = lambda line: bool(line.reply) and self._serves_anew(killed)  # noqa: E731
            case "database":
                self.database.kill()
                self._pause()
                self.database.start()
            case _:
                service = {"trainer": self.trainer, "server": self.server}.get(target, runner)
                service.kill()
                self._pause()
                service.start()
                if target == "runner":
                    back = _of(name)
        return Awaited(target, name, at, time.time(), back)

    def _kill_child(self, service: Service, word: str) -> psutil.Process | None:
        """`kill -9` of one of a service's processes; None when it has no such."""
        found = service.children(word)
        if not found:
            return None
        killed = self.dice.choice(found)
        with contextlib.suppress(psutil.NoSuchProcess):
            killed.kill()
        return killed

    def _serves_anew(self, killed: psutil.Process | None) -> bool:
        return any(child != killed for child in self.trainer.children(SERVING))

    def _pause(self) -> None:
        """What a supervisor waits before it starts something again."""
        time.sleep(self.dice.uniform(0.0, 1.5))

    def _idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.supervise()
            time.sleep(0.1)

    def supervise(self) -> None:
        """Start again what ended by itself, as a supervisor would. What ends by itself was not killed: it is counted."""
        for service in self.services:
            service.start()

    def finish(self, steps: Callable[[], int]) -> None:
        """Let the run take one more step, so that it is seen to go on, then stop everything in order."""
        before, end = steps(), time.time() + 2 * LONGEST_RECOVERY
        while steps() <= before:
            if time.time() > end:
                raise TimeoutError("the run took no further step after the last kill")
            self._idle(1.0)
        for service in [*self.runners, self.trainer, self.server]:
            service.stop()
        self.journal.read()

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for service in reversed(self.services):
            service.stop(5)
        self.database.close()


def _replies(line: Line) -> bool:
    return bool(line.reply)


def _of(runner: str) -> Callable[[Line], bool]:
    return lambda line: line.runner == runner


async def with_store(url: str, use: Callable[[Store], object]) -> object:
    """Call an async function with the open store."""
    store = plugins().store(url)
    await store.open()
    try:
        return await use(store)  # type: ignore[misc]  # every `use` here is async
    finally:
        await store.close()


def prepare(folder: Path, database: Database, seed: int, say: Callable[[str], None], clients: int) -> Campaign:
    """A campaign with a token, tasks and the commands of its processes; nothing but the database is started."""
    database.start()

    async def new_token(store: Store) -> str:
        token, plain = issue_token(Scope.RUNNER, name="chaos")
        await put_token(store, token)
        return plain

    token = str(asyncio.run(with_store(database.url, new_token)))
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"input": t.input, "expected": t.expected}) + "\n" for t in word_problems))
    journal = folder / "journal.jsonl"
    ports = free_port(), free_port()
    servers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    env = {
        "PYTHONPATH": str(ROOT),
        "CHAOS_JOURNAL": str(journal),
        "CHAOS_RUNNER": "none",
        "LIGHTNING_TOKEN": token,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "lightning"]
    # More rollouts than there is room for, so that a client which was started again has work at once.
    tasks_per_step = max(2, clients * AGENTS // 6)
    settings = {
        "trainer.steps": 100_000, "trainer.tasks_per_step": tasks_per_step, "trainer.eval_every": 0, "engine.lr": 2e-3,
        "policy_server.max_model_len": 1024, "server.port": ports[0], "trainer.trackers": "[]", "runner.max_attempts": 20,
    }  # fmt: skip
    trainer = Service(
        "trainer",
        [
            *command, "train", AGENT, "--model", str(MODEL), "--tasks", str(tasks), "--out",
            str(folder / "chaos"), "--runner", "remote", "--store", database.url,
            *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
        ],
        folder / "trainer.log", env, again=["--resume"],
    )  # fmt: skip
    server = Service(
        "server", [*command, "serve", "--store", database.url, "--port", str(ports[1])], folder / "server.log", env
    )
    runners = [
        Service(
            name,
            [
                *command, "runner", AGENT, "--server", servers, "--concurrency", str(AGENTS),
                "--set", "runner.lease_ttl=10",
            ],
            folder / f"{name}.log", env | {"CHAOS_RUNNER": name},
        )
        for name in (f"runner-{number}" for number in range(clients))
    ]  # fmt: skip
    return Campaign(folder, database, random.Random(seed), Journal(journal), trainer, server, runners, say=say)


def recovery(kills: Sequence[Kill]) -> dict[str, dict[str, float]]:
    """Count and percentiles of the seconds to recovery, for each kind of process."""
    found = {}
    for target in WEIGHTS:
        took = [kill.recovered for kill in kills if kill.target == target and kill.recovered is not None]
        if took:
            p50, p95 = np.percentile(took, (50, 95))
            found[target] = {"kills": len(took), "p50": round(float(p50), 2), "p95": round(float(p95), 2)}
    return found


def run_campaign(
    store: str,
    kills: int,
    seconds: float,
    seed: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    storm: bool = False,
    runners: int = RUNNERS,
) -> tuple[Verdict, list[Kill]]:
    """One campaign. Raises `TimeoutError`, with the logs, when something does not come back."""
    campaign = prepare(folder, DATABASES[store](folder), seed, say, runners)
    try:
        campaign.run(kills, seconds, storm=storm)

        async def count(opened: Store) -> int:
            return len(await opened.steps("chaos"))

        campaign.finish(lambda: int(str(asyncio.run(with_store(campaign.database.url, count)))))

        async def compare(opened: Store) -> Verdict:
            return await judge(opened, "chaos", campaign.journal.lines, LightningRL().group_size)

        verdict = asyncio.run(with_store(campaign.database.url, compare))
    finally:
        campaign.close()
    assert isinstance(verdict, Verdict)
    return verdict, campaign.kills


def main() -> int:
    """Run the campaign that the command line asks for; 1 when something was lost, invented or done twice."""
    parser = argparse.ArgumentParser(description="kill -9 everything that takes part in a run, and see what is lost")
    parser.add_argument("--store", choices=sorted(DATABASES), default="postgres")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=86_400, help="stop after so long, whatever was killed by then")
    parser.add_argument("--seed", type=int, default=0, help="the order of the kills")
    parser.add_argument("--storm", action="store_true", help="kill another while some are still away")
    parser.add_argument("--runners", type=int, default=RUNNERS, help="clients")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--keep", type=Path, help="put logs and database here, and leave them")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    verdict, kills = run_campaign(
        given.store, given.kills, given.seconds, given.seed, folder, say, storm=given.storm, runners=given.runners
    )
    result = {
        "store": given.store,
        "storm": given.storm,
        "runners": given.runners,
        "kills": len(kills),
        "recovery_seconds": recovery(kills),
        **asdict(verdict),
    }
    say(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps({**result, "load": os.getloadavg()}, indent=1) + "\n")
    if given.keep is None and verdict.ok:
        shutil.rmtree(folder)
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
