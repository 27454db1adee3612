"""Runs a run's rollouts to their end, by the trainer's own runner. A plugin (`RunServer`) lets others in than the agents of
this process, and may stand in for where agents run.

The invariant: each rollout that ends for good while this process waits for it is told once (to the caller and to the hook
`rollout_finished`), wherever its agent ran; what was lost on its last attempt ends although nobody leases any more. A setting
that needs a `RunServer` is refused by its name where no plugin brings one, before anything is started.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightning.addresses import is_loopback
from lightning.config import Config, RunnerConfig
from lightning.errors import StoreError
from lightning.gateway import Gateway
from lightning.gateway.stages import Line
from lightning.plugins import plugins
from lightning.runner.lease_loop import Source, work
from lightning.runner.protocol import Runner
from lightning.store.protocol import ShowsProject, Store
from lightning.store.url import parse
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import all_rollouts
from lightning.types import DEFAULT_PROJECT, LLM, Lease, Rollout

if TYPE_CHECKING:
    from lightning.trainer.stack import Stack


class ClientDoor(Protocol):
    """Lets clients run the agents of one run, through the port of its gateway. It is closed before the gateway is."""

    @property
    def config(self) -> Config:
        """The settings of the run, with the gateway on the port that clients know."""

    def open(self, store: Store, gateway: Gateway) -> None:
        """Answer clients on a gateway that has not started. The store is that of all projects."""

    async def agents(self, stack: Stack) -> Agents:
        """Let clients work for a run, and return what stands in for its `Stack.agents`. Files that clients need are written
        into the run's folder."""

    async def close(self) -> None:
        """Stop answering; requests that wait are ended."""


class GatewayProcesses(Protocol):
    """Gateways in processes of their own, which answer the calls of one run's agents."""

    async def start(self, gateway: Gateway) -> None:
        """Start them, and let the keys of the trainer's own gateway lead to them. Raises `GatewayError`."""

    async def attend(self) -> None:
        """Start those again that end, until cancelled. Raises `GatewayError` for one that does not stay up."""

    async def close(self) -> None:
        """End them, after the calls in flight."""


class RunServer(Protocol):
    """What a plugin registers with `register_servers`. It keeps nothing between two calls."""

    def door(self, runner: Runner, config: Config) -> ClientDoor | None:
        """What lets clients in; None where none are meant to come. A `runner` whose `concurrency` is 0 needs them."""

    def gateways(self, config: Config, store_url: str) -> GatewayProcesses | None:
        """The processes for a training with the store at this URL; None where its own process answers all calls. Their ports
        are bound. Raises `ConfigError` for settings that cannot be met, and `GatewayError` for a port in use."""

    async def check_exposure(self, store: Store, host: str) -> None:
        """Raise `ConfigError` unless what serves this store may listen on `host`, which is beyond this machine."""

    def project(self, config: Config) -> str:
        """The project of runs with these settings. Raises `ConfigError` for what cannot name one."""

    def of_project(self, store: Store, project: str) -> Store:
        """A store of all projects as one of them sees it, with its own names for resources."""


def run_server(wanted: str) -> RunServer:
    """Return the registered server. Raises `PluginError`, which says what `wanted` it, if none or several are registered."""
    return cast("Callable[[], RunServer]", plugins().sole("servers", wanted))()


def door_for(runner: Runner, config: Config) -> ClientDoor | None:
    """What lets clients run agents; None where all run here. Raises `PluginError` where clients are needed and no plugin lets
    them in."""
    if runner.concurrency and not plugins().names("servers"):
        return None
    wanted = "a training" if runner.concurrency else "a runner whose agents run in clients"
    return run_server(wanted).door(runner, config)


def gateways_for(config: Config, store_url: str) -> GatewayProcesses | None:
    """The gateways in processes of their own for a training; None without a store that other processes can open."""
    if not store_url or not plugins().names("servers"):
        return None
    return run_server("a training").gateways(config, store_url)


def check_server_settings(config: Config) -> None:
    """Raise `PluginError` for settings that open a port to others, and cannot be met."""
    if not is_loopback(host := config.gateway.host):
        run_server(f"gateway.host = {host!r}, beyond this machine,")


async def check_exposure(store: Store, host: str) -> None:
    """Return when a gateway of this store may listen on `host`; raises `ConfigError` or `PluginError` otherwise."""
    if not is_loopback(host):
        await run_server(f"to listen on {host!r}, beyond this machine,").check_exposure(store, host)


def project_of(config: Config) -> str:
    """The project of runs with these settings, as a plugin reads them; the default one without it. Raises `ConfigError` for
    what cannot name a project."""
    return run_server("a project").project(config) if plugins().names("servers") else DEFAULT_PROJECT


def of_project(store: Store, project: str) -> Store:
    """A store as `project` sees it, where it shows names as they are stored or is such a view already. The default project's
    is the store itself: its names are stored as they are."""
    if project == DEFAULT_PROJECT or (isinstance(store, ShowsProject) and store.project is not None):
        return store
    return run_server(f"the project {project!r}").of_project(store, project)


LOOK_SECONDS = 5.0
"""How often the store is asked what has ended without this process: a lease that expires is no news."""


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


class Agents:
    """The agents of one run, in this process: a `runner` leases its rollouts. Where others run agents, too, a plugin's subclass
    stands in for this (`ClientDoor.agents`).

    The stages of `line`, the gateway's, are asked of the outcomes of the runner. `expected` are the rollouts that are waited
    for, by their ids; `told` hears of the end of each. `how_to_join` is the command that starts a client; empty where nobody
    has to start one.
    """

    how_to_join = ""

    def __init__(
        self, store: Store, run: str, runner: Runner, config: RunnerConfig, llm_for: Callable[[Lease], LLM], line: Line
    ) -> None:
        self.store, self.run, self.runner = store, run, runner
        self.expected: dict[str, Rollout] = {}
        self._config, self._llm_for, self._line = config, llm_for, line
        self.told: Callable[[Rollout], None] = lambda rollout: None

    def expect(self, rollouts: Iterable[Rollout]) -> None:
        """Wait for these rollouts, too, and tell of the end of each. As far as is known none has ended."""
        self.expected |= {rollout.id: rollout for rollout in rollouts}

    async def create(self, rollouts: Sequence[Rollout]) -> None:
        """Create rollouts, those that exist already harmlessly, and expect their ends."""
        self.expect(rollouts)
        if await self.store.create_rollouts(rollouts) < len(rollouts):
            await self.forget_ended(rollouts)

    async def forget_ended(self, among: Sequence[Rollout]) -> None:
        """Stop waiting for those of these rollouts that have ended already, before this process; their ends are not told."""
        for rollout in await self._ended(among):
            self.expected.pop(rollout.id, None)

    async def work(self, told: Callable[[Rollout], None], source: Source | None = None) -> None:
        """Return when every expected rollout has ended; with a `source`, ask it for more and go on until cancelled."""
        self.told = told
        looking = asyncio.create_task(self.look_beside())
        try:
            await work(
                self.store,
                self.runner,
                self.run,
                self._llm_for,
                worker=f"{self.run}/local",
                config=self._config,
                line=self._line,
                on_finished=self.tell,
                source=source,
            )
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
        await self.look()

    async def look_beside(self) -> None:
        """Look for rollouts that ended without this process, until cancelled: other servers over the store may have clients."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def attend(self) -> None:
        """Keep what runs the agents elsewhere running, until cancelled; return if there is nothing to keep."""

    async def look(self) -> None:
        """Tell of those expected rollouts that have ended, as the store says."""
        for rollout in await self._ended(list(self.expected.values())):
            self.tell(rollout)

    def tell(self, rollout: Rollout) -> None:
        """Tell of the end of a rollout, once, if it is waited for."""
        if self.expected.pop(rollout.id, None) is not None:
            plugins().hook.rollout_finished(rollout=rollout)
            self.told(rollout)

    async def _ended(self, among: Sequence[Rollout]) -> list[Rollout]:
        """Return those of these rollouts that have ended, as the store says."""
        found, ids = [], {rollout.id for rollout in among}
        for split, step in {(rollout.split, rollout.step) for rollout in among}:
            found += await all_rollouts(self.store, self.run, split=split, step=step)
        return [rollout for rollout in found if rollout.status.ended and rollout.id in ids]


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

    def llm(self, gateway: Gateway, lease: Lease, prompts: Mapping[str, str], run: str = "") -> LLM:
        """The model as the agent of a lease sees it, with its prompts; evaluations may fix the temperature. `run` is that whose
        policy answers, if it is not the lease's own."""
        fixed = None if lease.rollout.split == TRAIN else self.eval_temperature
        llm = gateway.llm(lease, sampling=None if fixed is None else {"temperature": fixed}, run=run)
        return replace(llm, prompts=prompts, seed=self.agent_seed(lease.rollout))

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
