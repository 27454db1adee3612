"""A deployment run as processes of this machine: the commands of the generated files, until one step was trained.

The invariant: the commands are those that would run in containers, with other addresses and less work. One client is killed
while it works, and all rollouts must still end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.cli.output import with_store
from lightning.errors import DataError
from lightning.safe_text import counted
from lightning.store.places import run_id_of
from lightning.store.url import sqlite_url
from lightning.types import Status

from lightning_deploy import processes
from lightning_deploy.deploy_plan import DeployPlan, Places

LOOK_SECONDS = 0.5
LEASE_SECONDS = 8
"""Seconds until a killed client's rollouts are leased by another one."""


@dataclass(frozen=True, slots=True)
class Smoked:
    """The result of a smoke run. `report` is that of `lightning train`; `under_way` is how many rollouts the killed client ran,
    `trained` how many tokens the step had."""

    folder: Path
    report: dict[str, Any]
    under_way: int
    trained: int
    clients: int


class Processes:
    """The processes of a deployment, by their names."""

    def __init__(self, scripts: Path, logs: Path) -> None:
        path = os.pathsep.join((str(scripts), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        self._env, self._logs = {**os.environ, "PATH": path}, logs
        self.running: dict[str, processes.Process] = {}

    def start(self, name: str, command: list[str], **variables: str) -> None:
        """Start a process whose output goes to `NAME.log`."""
        self.running[name] = processes.start(command, self._logs / f"{name}.log", {**self._env, **variables})

    def said(self, name: str) -> str:
        """Return the end of a process's log."""
        return processes.last_words(self._logs / f"{name}.log")

    def check(self) -> None:
        """Raise `DataError` if a process has failed."""
        for name, process in self.running.items():
            if process.poll():
                raise DataError(f"{name} ended with exit code {process.returncode}: {self.said(name)}")

    def close(self) -> None:
        """End all processes."""
        processes.end(list(self.running.values()))


def smoke(
    plan: DeployPlan,
    scripts: Path,
    folder: Path,
    told: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    seconds: float = 900.0,
) -> Smoked:
    """Run the plan's processes in a new folder with the generated scripts, and return the result. Raises `DataError` when a
    process fails, or after `seconds`."""
    port, server_port = _free_port(), _free_port()
    places = Places(
        store=sqlite_url((folder / "store.db").resolve()),
        trainer=f"http://127.0.0.1:{port}",
        runs=str(folder / "runs"),
        tokens=str(folder / "tokens"),
        admin=str(folder / "admin"),
        scratch=str(folder),
        host=host,
        port=port,
        server_port=server_port,
    )
    for name in ("tokens", "admin"):
        (folder / name).mkdir(parents=True)
    deadline = time.monotonic() + seconds
    with contextlib.closing(Processes(scripts, folder)) as started:

        def until(reached: Callable[[], bool], what: str) -> None:
            while not reached():
                started.check()
                if time.monotonic() > deadline:
                    raise DataError(f"{what} did not come in {seconds:.0f} s: {started.said('trainer')}")
                time.sleep(LOOK_SECONDS)

        started.start("tokens", plan.token_command(places))
        until(lambda: started.running["tokens"].poll() == 0, "the tokens")
        told("tokens: made")
        started.start("trainer", plan.trainer_command(places, "--set", "trainer.steps=1"))
        started.start("server", plan.server_command(places))
        for url in (places.trainer, f"http://127.0.0.1:{server_port}"):
            until(lambda url=url: _healthy(url), f"{url}/api/v1/health")  # type: ignore[misc]
        told("trainer and server: healthy")
        names = [f"client-{number}" for number in range(1, plan.clients + 1)]
        client = plan.client_command(places)
        client[2:2] = ["--set", f"runner.lease_ttl={LEASE_SECONDS}"]
        # The first client starts alone, so that the rollouts that run when it is killed are its own.
        started.start(names[0], client, LIGHTNING_RUNNER__CONCURRENCY=str(plan.concurrency))
        until(lambda: _under_way(places, plan) > 0, "a rollout")
        under_way = _under_way(places, plan)
        processes.kill(started.running.pop(names[0]))
        for name in [*names[1:], f"client-{plan.clients + 1}"]:
            started.start(name, client, LIGHTNING_RUNNER__CONCURRENCY=str(plan.concurrency))
        told(f"{names[0]}: killed with {counted(under_way, 'rollout')} under way, and replaced")
        until(lambda: started.running["trainer"].poll() == 0, "the step")
    report = json.loads((Path(plan.out(places)) / "report.json").read_text(encoding="utf-8"))
    return Smoked(folder, report, under_way, int(report["trained_tokens"]), plan.clients + 1)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/health", timeout=4) as reply:  # noqa: S310 — http, made above
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _under_way(places: Places, plan: DeployPlan) -> int:
    """Return how many rollouts are running; 0 before the run begins."""
    out = Path(plan.out(places))
    if not (out / "run.json").exists():
        return 0
    run = run_id_of(out)
    counts = asyncio.run(with_store(places.store, lambda store: store.count_rollouts(run)))
    return sum(one.rollouts for one in counts if one.status is Status.RUNNING)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
