"""A deployment as processes of this machine: the commands of the generated files, until a step has been trained.

The invariant: what runs is what would run in containers, with other addresses and less work. A client is killed while it
works, and all rollouts end all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.cli.locate import with_store
from lightning.errors import DataError
from lightning.store.places import run_id_of
from lightning.store.url import sqlite_url
from lightning.types import Status

from lightning_deploy.deploy_plan import DeployPlan, Places

LOOK_SECONDS = 0.5
LEASE_SECONDS = 8
"""How long a killed client's rollouts wait for another one."""
END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Smoked:
    """What came of it. `report` is that of `lightning train`; `under_way` is how many rollouts the client ran that was killed,
    `trained` how many tokens the step has."""

    folder: Path
    report: dict[str, Any]
    under_way: int
    trained: int
    clients: int


class Processes:
    """Processes with logs, each in a group of its own, so that one is ended with all that it has started."""

    def __init__(self, scripts: Path, logs: Path) -> None:
        path = os.pathsep.join((str(scripts), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        self._env, self._logs = {**os.environ, "PATH": path}, logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], **variables: str) -> None:
        """Start it; what it says goes to `NAME.log`."""
        with (self._logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(  # noqa: S603 — the generated command, without a shell
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self._env, **variables},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill it as a lost machine would be, with all that it has started."""
        process = self.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def said(self, name: str) -> str:
        """The end of what it said."""
        return (self._logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip()[-600:]

    def check(self) -> None:
        """Raises `DataError` for one that failed."""
        for name, process in self.running.items():
            if process.poll():
                raise DataError(f"{name} ended with exit code {process.returncode}: {self.said(name)}")

    def stop(self) -> None:
        """Tell all to end, and end those that do not."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for process in self.running.values():
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def _processes(scripts: Path, logs: Path) -> Iterator[Processes]:
    found = Processes(scripts, logs)
    try:
        yield found
    finally:
        found.stop()


def smoke(
    plan: DeployPlan,
    scripts: Path,
    folder: Path,
    told: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    seconds: float = 900.0,
) -> Smoked:
    """Run the plan in a new folder with the scripts of the images. Raises `DataError` when a process fails, or time is over."""
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
    with _processes(scripts, folder) as processes:

        def until(reached: Callable[[], bool], what: str) -> None:
            while not reached():
                processes.check()
                if time.monotonic() > deadline:
                    raise DataError(f"{what} did not come in {seconds:.0f} s: {processes.said('trainer')}")
                time.sleep(LOOK_SECONDS)

        processes.start("tokens", plan.token_command(places))
        until(lambda: processes.running["tokens"].poll() == 0, "the tokens")
        told("tokens: made")
        processes.start("trainer", plan.trainer_command(places, "--set", "trainer.steps=1"))
        processes.start("server", plan.server_command(places))
        for url in (places.trainer, f"http://127.0.0.1:{server_port}"):
            until(lambda url=url: _healthy(url), f"{url}/api/v1/health")  # type: ignore[misc]
        told("trainer and server: healthy")
        names = [f"client-{number}" for number in range(1, plan.clients + 1)]
        client = plan.client_command(places)
        client[2:2] = ["--set", f"runner.lease_ttl={LEASE_SECONDS}"]
        # The first one is alone until it works: so what runs when it is killed is its own.
        processes.start(names[0], client, LIGHTNING_RUNNER__CONCURRENCY=str(plan.concurrency))
        until(lambda: _under_way(places, plan) > 0, "a rollout")
        under_way = _under_way(places, plan)
        processes.kill(names[0])
        for name in [*names[1:], f"client-{plan.clients + 1}"]:
            processes.start(name, client, LIGHTNING_RUNNER__CONCURRENCY=str(plan.concurrency))
        told(f"{names[0]}: killed with {under_way} rollouts under way, and replaced")
        until(lambda: processes.running["trainer"].poll() == 0, "the step")
    report = json.loads((Path(plan.out(places)) / "report.json").read_text(encoding="utf-8"))
    return Smoked(folder, report, under_way, int(report["trained_tokens"]), plan.clients + 1)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/health", timeout=4) as reply:  # noqa: S310 — http, made above
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _under_way(places: Places, plan: DeployPlan) -> int:
    """How many rollouts a client is working on."""
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
