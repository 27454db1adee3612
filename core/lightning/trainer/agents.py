"""Runs a run's rollouts to their end: by the trainer's own runner, by clients elsewhere, or by both at once. Whatever lets
others in than the agents of this process is a plugin's (`RunServer`).

The invariant: each rollout that ends for good while this process waits for it is told once (to the caller and to the hook
`rollout_finished`), wherever its agent ran; what was lost on its last attempt ends although nobody leases any more. A setting
that needs a `RunServer` is refused by its name where no plugin brings one, before anything is started.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from lightning.addresses import is_loopback
from lightning.config import Config, RunnerConfig
from lightning.errors import ConfigError, DataError, StoreError
from lightning.gateway import Gateway
from lightning.gateway.connections import guard_of
from lightning.gateway.stages import Line
from lightning.plugins import plugins
from lightning.runner.lease_loop import Source, work
from lightning.runner.protocol import Agent, Runner, Site
from lightning.store.protocol import ShowsProject, Store
from lightning.store.url import parse
from lightning.trainer.training_data import all_rollouts
from lightning.types import DEFAULT_PROJECT, LLM, Lease, Rollout, Run, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a client needs to work for a run, and the command that starts one, for a person to type."""

    site: Site
    command: str


class ClientDoor(Protocol):
    """Answers clients on the port of one gateway, until it is closed, which is before the gateway is."""

    async def invite(self, run: Run, folder: Path) -> Invitation:
        """Let clients work for a run; files that they need are written into `folder`, which is the run's."""

    async def close(self) -> None:
        """Stop answering; requests that wait are ended."""


class RunServer(Protocol):
    """What a plugin registers with `register_servers`. It keeps nothing between two calls."""

    def on_port(self, config: Config) -> Config:
        """The settings of a trainer, with the gateway on the port that clients know."""

    async def check_exposure(self, store: Store, host: str) -> None:
        """Raise `ConfigError` unless what serves this store may listen on `host`, which is beyond this machine."""

    def open(self, store: Store, gateway: Gateway, config: Config) -> ClientDoor:
        """Answer clients on a gateway that has not started. The store is that of all projects."""

    def check_project(self, project: str) -> None:
        """Raise `DataError` for what cannot name a project."""

    def of_project(self, store: Store, project: str) -> Store:
        """A store of all projects as one of them sees it, with its own names for resources."""


def run_server(wanted: str) -> RunServer:
    """Return the registered server. Raises `PluginError`, which says what `wanted` it, if none or several are registered."""
    return cast("Callable[[], RunServer]", plugins().sole("servers", wanted))()


def check_server_settings(config: Config) -> None:
    """Raise `PluginError` for settings that open a port to others, or guard it, and cannot be met."""
    if config.server.port:
        run_server(f"server.port = {config.server.port}")
    for setting, host in (("gateway.host", config.gateway.host), ("server.host", config.server.host)):
        if not is_loopback(host):
            run_server(f"{setting} = {host!r}, beyond this machine,")
    guard_of(config.gateway.limits, "localhost")


async def check_exposure(store: Store, host: str) -> None:
    """Return when a gateway of this store may listen on `host`; raises `ConfigError` or `PluginError` otherwise."""
    if not is_loopback(host):
        await run_server(f"to listen on {host!r}, beyond this machine,").check_exposure(store, host)


def project_of(config: Config) -> str:
    """The setting `trainer.project`. Raises `ConfigError` for what cannot name one."""
    project = config.trainer.project
    if project != DEFAULT_PROJECT:
        server = run_server(f"trainer.project = {project!r}")
        try:
            server.check_project(project)
        except DataError as error:
            raise ConfigError(f"trainer.project: {error}") from error
    return project


def of_project(store: Store, project: str) -> Store:
    """A store as `project` sees it, where it shows names as they are stored or is such a view already. The default project's
    is the store itself: its names are stored as they are."""
    if project == DEFAULT_PROJECT or (isinstance(store, ShowsProject) and store.project is not None):
        return store
    return run_server(f"the project {project!r}").of_project(store, project)


LOOK_SECONDS = 5.0
"""How often the store is asked without news of a change: a lease that expires is no change."""
SETTLE_SECONDS = 0.2
"""How long news are gathered before the store is asked: with a hundred clients there is always some."""
ROOM_SECONDS = 0.25
"""How often to see whether clients have taken what waits, while more groups may begin."""
SILENCE_SECONDS = 30.0
"""How long rollouts wait for a client until a warning says so, and between two warnings."""


def hidden_from_agents(config: Config, out: Path, url: str) -> Config:
    """Return the settings with the run's folder, and that of its SQLite store, hidden from agents in a sandbox. The sandbox may
    be the runner's, or one that an agent makes for its program."""
    runner = config.runner
    secret = [out.resolve()]
    where = parse(url)
    if where.scheme == "sqlite":
        secret.append(Path(where.path).resolve().parent)
    hidden = tuple(dict.fromkeys((*runner.sandbox_hidden, *map(str, secret))))
    return config.model_copy(update={"runner": runner.model_copy(update={"sandbox_hidden": hidden})})


def runner_here(name: str, agent: Agent, config: Config, out: Path, url: str) -> Runner:
    """Make the runner of this name, which runs the agent on this machine and hides the run's folder and store from it. Raises
    `ConfigError` for a runner whose agents run elsewhere."""
    runner = plugins().runner(name)(agent, hidden_from_agents(config, out, url))
    if runner.concurrency == 0:
        raise ConfigError(f"runner {name!r} runs no agents here, and this needs that: use process or inline")
    return runner


class Agents:
    """The agents of one run. A `runner` whose `concurrency` is 0 runs none in this process: clients do.

    The stages of `line`, the gateway's, are asked of the outcomes of its own runner. `how_to_join` is the command that starts a
    client (empty: the runner does), told when nobody takes what waits. With `shared` clients are expected beside the runner of
    this process.
    """

    def __init__(
        self, store: Store, run: str, runner: Runner, config: RunnerConfig, llm_for: Callable[[Lease], LLM], line: Line
    ) -> None:
        self._store, self._run, self._runner, self._config = store, run, runner, config
        self._llm_for, self._line = llm_for, line
        self._open: dict[str, Rollout] = {}
        self._told: Callable[[Rollout], None] = lambda rollout: None
        self._silent_since = time.monotonic()
        self.how_to_join = "lightning runner"
        self.shared = False

    @property
    def elsewhere(self) -> bool:
        """Whether all agents run in clients."""
        return self._runner.concurrency == 0

    def expect(self, rollouts: Iterable[Rollout]) -> None:
        """Wait for these rollouts, too, and tell of the end of each. As far as is known none has ended."""
        self._open |= {rollout.id: rollout for rollout in rollouts}

    async def forget_ended(self, among: Sequence[Rollout]) -> None:
        """Stop waiting for those of these rollouts that have ended already, before this process; their ends are not told."""
        for rollout in await self._ended(among):
            self._open.pop(rollout.id, None)

    async def work(self, told: Callable[[Rollout], None], source: Source | None = None) -> None:
        """Return when every expected rollout has ended; with a `source`, ask it for more and go on until cancelled."""
        self._told = told
        if self.elsewhere:
            await self._attend(source)
            return
        elsewhere = asyncio.create_task(self._look_beside())
        try:
            await work(
                self._store,
                self._runner,
                self._run,
                self._llm_for,
                worker=f"{self._run}/local",
                config=self._config,
                line=self._line,
                on_finished=self._tell,
                source=source,
            )
        finally:
            elsewhere.cancel()
            with suppress(asyncio.CancelledError):
                await elsewhere
        await self._look()

    async def _look_beside(self) -> None:
        """Look for rollouts that clients have ended, of this run's server or of another one over the store, until cancelled."""
        if not self.shared:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await self._look()
        async with self._store.watch(self._run) as watch:
            while True:
                await self._look()
                await watch.wait(LOOK_SECONDS)
                await asyncio.sleep(SETTLE_SECONDS)

    async def _attend(self, source: Source | None) -> None:
        """Wait until clients have ended every expected rollout; with a source let groups begin, until cancelled."""
        self._silent_since = time.monotonic()
        async with self._store.watch(self._run) as watch:
            while True:
                await self._store.lease(self._run, f"{self._run}/trainer", limit=0)  # ends what no attempt is left for
                await self._look()
                if source is None and not self._open:
                    return
                more = source is not None and await self._refill(source)
                await self._check_silence()
                wait = ROOM_SECONDS if more else LOOK_SECONDS
                if source is None:
                    await watch.wait(wait)
                else:
                    await _first(watch.wait(wait), source.changed.wait())
                    source.changed.clear()
                await asyncio.sleep(SETTLE_SECONDS)

    async def _refill(self, source: Source) -> bool:
        """Let a group begin when no rollout waits to be leased. Return whether another group may begin soon.

        Where agents run is not known here, so one group is ahead of them: it begins when the one before was taken.
        """
        if (await self._store.list_rollouts(self._run, status=Status.PENDING, limit=1)).items:
            return True
        return await source.refill()

    async def _look(self) -> None:
        for rollout in await self._ended(list(self._open.values())):
            self._tell(rollout)

    async def _ended(self, among: Sequence[Rollout]) -> list[Rollout]:
        """Return those of these rollouts that have ended, as the store says."""
        found, ids = [], {rollout.id for rollout in among}
        for split, step in {(rollout.split, rollout.step) for rollout in among}:
            found += await all_rollouts(self._store, self._run, split=split, step=step)
        return [rollout for rollout in found if rollout.status.ended and rollout.id in ids]

    def _tell(self, rollout: Rollout) -> None:
        self._silent_since = time.monotonic()
        if self._open.pop(rollout.id, None) is not None:
            plugins().hook.rollout_finished(rollout=rollout)
            self._told(rollout)

    async def _check_silence(self) -> None:
        """Log a warning when rollouts have waited for `SILENCE_SECONDS` and nobody runs any."""
        if not self._open or time.monotonic() - self._silent_since < SILENCE_SECONDS:
            return
        self._silent_since = time.monotonic()
        if (await self._store.list_rollouts(self._run, status=Status.RUNNING, limit=1)).items:
            return
        logger.warning(
            "%d rollouts of run %s wait, and no client has taken one for %.0f s. %s",
            len(self._open),
            self._run,
            SILENCE_SECONDS,
            f"Start one where the agents are to run: {self.how_to_join}"
            if self.how_to_join
            else "The runner starts them",
        )


async def _first(*things: Coroutine[object, object, object]) -> None:
    """Return when one of these coroutines has returned, and cancel the others. An error of the first is raised."""
    tasks = [asyncio.create_task(thing) for thing in things]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HOW_TO_CALL = "how_to_call"


@dataclass(frozen=True, slots=True)
class HowToCall:
    """`own` are prompt templates by component, `bound` the resources of the other components, `versions` what a rollout runs
    with unless it says otherwise, by resource. `eval_temperature` is that of evaluations, None for the agent's own.
    `seed` is the run's, from which those of its agents follow; None where they get none.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    eval_temperature: float | None = None
    seed: int | None = None

    def agent_seed(self, rollout: Rollout) -> int | None:
        """63 bits for the agent's process: the same for the same rollout of a repeated run, whatever that is called, and others
        for every other rollout and attempt, also of the same task in a later pass. A branch has that of its parent."""
        if self.seed is None:
            return None
        where, attempt = rollout.id.removeprefix(rollout.run), rollout.attempt
        if rollout.parent is not None:
            parent, attempt, _ = rollout.parent
            mine = parent.startswith(f"{rollout.run}/")
            where = parent.removeprefix(rollout.run) if mine else f"/{parent.partition('/')[2]}"
        place = json.dumps([self.seed, where, rollout.task.id, attempt])
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1

    async def prompts(self, rollout: Rollout, text: Callable[[str, int], Awaitable[str]]) -> dict[str, str]:
        """The prompt of each component in a rollout as its project sees it. `text` gives that of a resource's version."""
        found = dict(self.own)
        chosen = {**self.versions, **rollout.resources}
        for component, name in self.bound.items():
            if name in chosen:
                found[component] = await text(name, chosen[name])
        return found

    @classmethod
    async def of_run(cls, store: Store, run: str) -> HowToCall:
        """Read what the run's trainer has kept; an empty `HowToCall` if nothing was kept."""
        kept = await store.get_state(run, HOW_TO_CALL)
        try:
            return cls(**cast("Any", kept)) if isinstance(kept, Mapping) else cls()
        except TypeError as error:
            raise StoreError(
                f"what the trainer of run {run!r} keeps for servers is not of this version of lightning ({error}): "
                "use the trainer's version, or begin a new run"
            ) from error

    async def keep(self, store: Store, run: str) -> None:
        """Keep this in the state of the run, where every server over the store finds it."""
        await store.put_state(run, HOW_TO_CALL, asdict(self))
