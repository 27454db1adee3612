"""The update of a vLLM behind the `PolicyServer` contract, and the vLLM that this process starts.

The invariant: between two updates a server samples from exactly the version it says it has. When an update fails after the
pause, the old weights are put back. If even that fails, nothing is ever sampled again from the weights that are left.

The probe comes after the resume, because a paused vLLM answers no completion. With LoRA, a file holds the whole weights, or
adapters that the workers merge.

This module also keeps the port, process group and log of the vLLM it starts: after `stop` no process of the group is left, and
`explain` says what went wrong at a start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from lightning.asyncio_utils import to_its_end
from lightning.config.sections import Config, PolicyServerConfig
from lightning.errors import ConfigError, DataError, PluginError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import DEFAULT_DEMAND, Demand, choose, pick_device, this_machine, why_slow
from lightning.policy_server.control import CONTROL_SECONDS, NoAnswerError, NotOursError, VLLMControl
from lightning.policy_server.model_folder import check_model_folder, check_weights, checkpoint_files, read_facts
from lightning.policy_server.owner_secret import SECRET
from lightning.policy_server.protocol import PolicyServer, Probe, Update, Usage
from lightning.policy_server.vllm_arguments import (
    check_args,
    check_host,
    require_vllm,
    server_args,
    server_env,
    server_parts,
)
from lightning.policy_server.weights import FromDisk, WeightTransfer
from lightning.processes import kill_group
from lightning.store.url import redacted
from lightning.types import POLICY

TAIL_LINES = 15
MAX_LINE = 400
STOP_SECONDS = 15.0
"""How long vLLM may take to end on SIGTERM before its group is killed."""
_CULPRIT = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|Exit)\b: .*\S|\bKilled\b|Segmentation fault")
_HARMLESS = re.compile(r"^(?:\([^)]*\)\s*)*(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
"""Matches the beginning of a log line that reports no error; vLLM's warnings name errors that may come."""


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a port until the server listens on it; 0 takes a free one.

    Our socket is bound but never listens. The server's own socket may bind beside it, since both set SO_REUSEADDR, and nobody
    else is handed the port meanwhile. Raises PolicyServerError when somebody listens there already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise PolicyServerError(
                f"vLLM cannot listen on {host}:{port} ({error.strerror}); "
                "stop what listens there, or set policy_server.port to another one (0 takes a free one)"
            ) from error
        yield held.getsockname()[1]


class ServerProcess:
    """vLLM, started through our launcher as the leader of its own session, so that Ctrl-C reaches only its owner. `cures` are
    those of `WeightTransfer`."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], log: Path, cures: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.log, self._cures = log, cures
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._log_start = file.tell()
            # -P: a module in the current directory must not hide one of vLLM's.
            self._popen = subprocess.Popen(  # noqa: S603 — our own interpreter and arguments, no shell
                [sys.executable, "-P", "-m", "lightning.policy_server.launch", *args],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the API server, which leads the group."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs, negative for the signal that ended it."""
        return self._popen.poll()

    def explain(self) -> str:
        """Return the first error that this start wrote to its log, with its cure if one is known, and the log's last lines."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
        lines = [line[:MAX_LINE] for line in lines if line.strip()]
        told = (line for line in lines if not _HARMLESS.search(line))
        culprit = next((match.group() for line in told if (match := _CULPRIT.search(line))), "")
        cure = next((f"{cure}. " for error, cure in self._cures if re.search(error, culprit)), "")
        tail = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:]) or "  | (nothing was written)"
        return f"{f'{culprit}. ' if culprit else ''}{cure}The last lines of {self.log}:\n{tail}"

    async def stop(self, *, patience: float = STOP_SECONDS) -> None:
        """End vLLM and everything it started: first by SIGTERM, after `patience` seconds by SIGKILL. May be called again."""
        if self.returncode is None:
            self._popen.terminate()
            await self._wait(patience)
        self.kill()
        await self._wait(patience)

    def kill(self) -> None:
        """Kill every process of vLLM's group now."""
        kill_group(self.pid)

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.returncode is None and loop.time() < deadline:  # noqa: ASYNC110 — a child has no event
            await asyncio.sleep(0.05)


logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""Seconds between two checks of a server's health."""
PROBE_SECONDS, PROBE_TRIES = CONTROL_SECONDS, 5
"""Most seconds that a probe's answer may take, and the most times that it is requested."""
REFUSALS = 5
"""A server counts as dead after this many refused connections in a row, although its process lives."""


def files_of(weights: Path) -> Sequence[Path]:
    """Return the safetensors files of new weights: `weights` itself, or the files of a model's folder."""
    return checkpoint_files(weights) if weights.is_dir() else [weights]


class VLLMServer(ABC):
    """The parts that all vLLMs share, started by us or by others: above all the update."""

    def __init__(self, model: Path, version: int, transfer: WeightTransfer) -> None:
        self._folder, self._transfer = model, transfer
        self.version = version
        """The version of the weights that it samples from now."""
        self.model = self._alias = ""
        """The served model name requests must carry."""
        self.claim = ""
        """The word that this trainer left in the server, if the server is identified by that; else empty."""
        self._control: VLLMControl | None = None
        self._serving = False
        self._weights: Sequence[Path] = ()
        """The files of the current version; empty if unknown here, as for a server that ran before."""
        self._changing = asyncio.Lock()

    @property
    def url(self) -> str:
        """Root URL without `/v1`. Raises PolicyServerError before the first start."""
        return self._running().url

    @property
    def alias(self) -> str:
        """The served model name that the policy's calls carry: that of this start, or else `model`."""
        return self._alias or self.model

    @property
    def models(self) -> Sequence[tuple[str, str]]:
        """Each policy that the server answers, with the model name that its calls carry. Empty for a server with one policy,
        whose calls carry `alias`."""
        return self._transfer.models(self.alias)

    async def healthy(self) -> bool:
        """Whether the server and its engine answer now."""
        return self._control is not None and await self._control.health() == "ok"

    async def usage(self) -> Usage | None:
        """Return what its requests have needed since it was started; None if unknown."""
        try:
            return await self._running().usage()
        except PolicyServerError as error:
            logger.debug("%s does not say what its requests have needed: %s", self.model, error)
            return None

    async def facts(self) -> Mapping[str, object]:
        """Return what vLLM says of its model that is the same for all servers of one policy; empty if it says nothing."""
        try:
            return await self._running().facts()
        except PolicyServerError as error:
            logger.warning("%s cannot be compared with the policy's other servers: %s", self.url, error)
            return {}

    async def sleep(self) -> None:
        """Free the GPU's memory until `wake`; requests wait."""
        await self._running().sleep()

    async def wake(self) -> None:
        """Take the GPU's memory back and go on."""
        await self._running().wake_up()

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        """Put new weights into the running server; see `PolicyServer.update`.

        Once the server is paused a cancelled update is finished before the cancellation takes effect: frozen requests
        would wait for ever otherwise.
        """
        for probe in probes:
            if len(probe.ids) != len(probe.logprobs):
                raise DataError(
                    f"a probe of {len(probe.ids)} ids has {len(probe.logprobs)} logprobs; give one for each"
                )
        async with self._changing:
            update = await self._take(weights, version)
            return replace(update, served=tuple([await self._probed(probe) for probe in probes]))

    async def _probed(self, probe: Probe) -> Sequence[float]:
        """Return the server's logprobs of a probe; none if the probe's policy does not answer here. A busy machine may answer
        late, so a server that is not dead is asked again."""
        control, tries = self._running(), 1
        if (model := dict(self.models or [(POLICY, self.model)]).get(probe.policy)) is None:
            return ()
        while True:
            try:
                return await control.served_logprobs(model, probe.ids, PROBE_SECONDS)
            except NoAnswerError as error:
                state = await control.health()
                if tries == PROBE_TRIES or state in ("dead", "refused"):
                    raise
                logger.warning("%s. Its health is %s: it is asked again (%d of %d)", error, state, tries, PROBE_TRIES)
                tries += 1

    async def _take(self, weights: Path | None, version: int) -> Update:
        """Check the weights and exchange them. A cancelled call still completes the exchange with vLLM."""
        control = self._running()
        weights = weights and self._transfer.part(weights)
        if weights is not None:
            await asyncio.to_thread(check_weights, weights, self._folder)
        started = time.perf_counter()
        in_flight = await to_its_end(self._exchange(control, weights, version))
        update = Update(version, in_flight, time.perf_counter() - started)
        logger.info("version %d in %.3f s, %d requests counted", version, update.seconds, len(in_flight))
        return update

    async def _exchange(self, control: VLLMControl, weights: Path | None, version: int) -> Mapping[str, int]:
        """Pause, read the counts, load, drop the cache, set the version, resume; return the counts. Without weights nothing is
        loaded or dropped."""
        loading, naming, what = False, False, weights or f"the name of version {version}"
        await control.check_ours()  # a server of another trainer is not even paused
        try:
            if weights is not None:
                await self._transfer.ready(control)
        except PolicyServerError as error:
            raise PolicyServerError(f"{what} was not taken, version {self.version} goes on: {error}") from error
        await control.check_ours()  # getting ready may take long
        try:
            await control.pause()
            in_flight = await control.in_flight()
            if weights is not None:
                loading = True
                await self._transfer.load(control, files_of(weights))
                await control.drop_prefix_cache()
            naming = True
            await control.set_version(version)
        except NotOursError:
            await self._let_be(control)
            raise
        except PolicyServerError as error:
            await self._put_back(control, error, loading=loading, naming=naming)
            raise PolicyServerError(f"{what} was not taken, version {self.version} goes on: {error}") from error
        self.version = version
        if weights is not None:
            self._weights = files_of(weights)
        try:
            await control.resume()
        except PolicyServerError as error:
            raise PolicyServerError(f"version {version} is loaded but paused: {error}. {self._give_up()}") from error
        return in_flight

    async def _put_back(self, control: VLLMControl, cause: PolicyServerError, *, loading: bool, naming: bool) -> None:
        """Load the old weights again, set their version, and resume. If that fails, keep the server from sampling."""
        try:
            await control.check_ours()
            if loading and not self._weights:
                raise PolicyServerError(
                    f"this trainer has not given it version {self.version} and has no weights of it"
                )
            if loading:
                await self._transfer.load(control, self._weights)
                await control.drop_prefix_cache()
            if loading or naming:
                await control.set_version(self.version)
            await control.resume()
        except NotOursError:
            await self._let_be(control)
            raise
        except PolicyServerError as error:
            outcome = self._give_up()
            raise PolicyServerError(
                f"{cause}; then version {self.version} could not be put back either ({error}). {outcome}"
            ) from cause

    async def _let_be(self, control: VLLMControl) -> None:
        """Leave a server to its new owner, after we lost it while it was paused: resume it, unless its weights are being
        loaded."""
        try:
            if await control.attach() is not None:
                await control.resume()
        except PolicyServerError as error:
            logger.warning("%s may stay paused until its trainer gives it weights: %s", control.url, error)

    @abstractmethod
    def _give_up(self) -> str:
        """Keep a server with undefined weights from sampling, and return what the user should do."""

    def _running(self) -> VLLMControl:
        if self._control is None:
            raise PolicyServerError("the policy server has not been started; await start() first")
        return self._control

    async def wait_died(self) -> None:
        """Return when the server has died without having been stopped; never return while it lives, or after `close`.

        A server is dead if its process ended, its engine is gone, nobody has listened for some seconds, or another server
        answers in its place. A slow server is not dead.
        """
        refusals, asked = 0, time.monotonic()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._serving or self._control is None:
                refusals = 0
                continue
            if self._exited():
                return
            if time.monotonic() - asked < LOOK_SECONDS:
                continue
            asked, state = time.monotonic(), await self._control.health()
            refusals = refusals + 1 if state == "refused" else 0
            dead = state == "dead" or refusals >= REFUSALS or (state == "ok" and await self._is_another(self._control))
            if self._serving and dead:
                return

    def _exited(self) -> bool:
        return False

    async def _is_another(self, control: VLLMControl) -> bool:
        """Whether another server answers than the one that was started or attached to."""
        return False


class OwnedVLLM(VLLMServer):
    """A vLLM that this process starts, and that never outlives it. `log` receives all it prints, over all starts.

    The port is chosen at the first start and kept, so that `url` stays the same over restarts. Each start serves the model
    under a second, new name, so that another server at this address is not mistaken for it. New weights come by `transfer`
    (None: from files). Without `updates` it is never given any, and may be data parallel.
    """

    def __init__(
        self,
        model: Path,
        config: PolicyServerConfig,
        transfer: WeightTransfer | None = None,
        *,
        log: Path,
        name: str = "policy",
        version: int = 0,
        updates: bool = True,
        demand: Demand = DEFAULT_DEMAND,
    ) -> None:
        super().__init__(model.resolve(), version, transfer or FromDisk())
        self._config, self._log, self.model, self._updates = config, log, name, updates
        self._demand = demand
        self._port = config.port
        self._process: ServerProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the API server, which leads the group of all its processes; None when none was started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start vLLM with the weights of the model folder, and return once it answers.

        Raises MissingExtraError without vLLM, and PolicyServerError when the model folder is incomplete, the port is taken, or
        vLLM ends or stays silent (with the last lines of its log).
        """
        async with self._changing:
            await self._start(self.version)

    async def _start(self, version: int) -> None:
        """Start vLLM with the folder's weights as `version`. If anything fails, stop it again."""
        if self._process is not None:
            raise PolicyServerError(f"the policy server runs already (pid {self.pid}); close() it first")
        if self._updates:
            check_args(self._config)
        check_model_folder(self._folder)
        device = pick_device(self._config)
        require_vllm(device)
        await asyncio.to_thread(self._transfer.check, device)
        facts = await asyncio.to_thread(read_facts, self._folder)
        machine = this_machine()
        chosen = choose(self._config, facts, device, machine, demand=self._demand)
        logger.info("vLLM for %s on %s: %s", self._folder.name, device, "; ".join(chosen.reasons))
        if slow := why_slow(chosen.dtype, facts, device, machine):
            logger.warning("%s: %s", self._folder.name, slow)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        with reserved_port(self._config.host, self._port) as self._port:
            self._alias = f"{self.model}-{secrets.token_hex(8)}"
            names, parts = (self.model, self._alias), server_parts()
            args = server_args(
                self._folder,
                self._config,
                chosen,
                device=device,
                names=names,
                port=self._port,
                transfer=self._transfer,
                parts=parts,
            )
            secret = os.environ.get(SECRET) or secrets.token_hex(32)
            env = server_env(
                os.environ,
                device=device,
                threads=chosen.threads,
                gathers=chosen.gathers,
                gpus=self._config.gpus,
                parts=parts,
            ) | {SECRET: secret}
            self._process = ServerProcess(args, env, self._log, self._transfer.cures)
            self._control = VLLMControl(f"http://{host}:{self._port}", secret)
            try:
                await self._until_ready(self._process, self._control, chosen.start_timeout)
                if self._config.args or device == "cuda":  # which may have changed what we ask for
                    await self._control.check_settings(self._transfer.extension, updates=self._updates)
                if self._updates:
                    await self._control.check_one_engine()
                await self._control.attach()
                await self._control.set_version(version)
            except BaseException:
                await self._stop()
                raise
        self.version, self._weights, self._serving = version, checkpoint_files(self._folder), True

    async def _until_ready(self, process: ServerProcess, control: VLLMControl, seconds: float) -> None:
        """Return when vLLM answers. Raises `PolicyServerError` with its log when it ends, or does not answer in time."""
        deadline = time.monotonic() + seconds
        while process.returncode is None:
            if await control.health() == "ok":
                return
            if time.monotonic() > deadline:
                raise PolicyServerError(
                    f"vLLM did not answer within {seconds:.0f} s; "
                    f"raise policy_server.start_timeout if it was only slow. {process.explain()}"
                )
            await asyncio.sleep(POLL_SECONDS)
        raise PolicyServerError(f"vLLM ended at its start with code {process.returncode}. {process.explain()}")

    def _exited(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def restart(self, weights: Path | None, version: int) -> None:
        """Start a dead or a running server again, with `weights` (None: the folder's) as `version`."""
        async with self._changing:
            await self._stop()
            await self._start(version)
            if weights is None:
                return
            try:
                await self._take(weights, version)
            except PolicyServerError as error:
                # It runs with the folder's weights now, and these are not those of `version`.
                raise PolicyServerError(
                    f"the restarted policy server refused its weights: {error}. {self._give_up()}"
                ) from error

    def _give_up(self) -> str:
        if self._process is not None:
            self._process.kill()  # `wait_died` now returns
        return "It was stopped; restart it with the weights of a checkpoint"

    async def close(self) -> None:
        """End vLLM and every process it started."""
        await self._stop()  # without the lock: an update that hangs must not keep it alive

    async def _stop(self) -> None:
        self._serving = False
        if self._process is not None:
            await self._process.stop()
            self._process = None


def make_policy_server(
    model: Path,
    config: Config,
    *,
    log: Path,
    version: int = 0,
    claims: bool = True,
    sender: object | None = None,
    demand: Demand = DEFAULT_DEMAND,
    transfer: Callable[[WeightTransfer], WeightTransfer] | None = None,
) -> PolicyServer:
    """Make the server that `config` asks for, not started yet: an own one (`log` gets its output), on this machine or at
    `policy_server.placement`, or that at `policy_server.attach`.

    Without `claims` it gets no new weights: a server that others run is used as it is, and somebody else may train it. `sender`
    is the engine that sends weights (`lightning.engines.protocol.SendsWeights`); None if this process has the weights. An own
    server is set up for the `demand`. Weights come by the `transfer` that is made from that of the settings (None: by that of
    the settings). Raises `PluginError` where a plugin is missing, and `ConfigError` for settings that
    cannot be met.
    """
    settings = config.policy_server
    check_policy_server(settings)
    if not isinstance(settings.attach, str):
        raise ConfigError(
            "policy_server.attach names several servers, and here there is one policy server: name one, as text"
        )
    make = cast(
        "Callable[[Config, object | None], WeightTransfer]", plugins().get("weight_transfers", settings.weight_transfer)
    )
    way = make(config, sender)
    if transfer is not None:
        way = transfer(way)
    if settings.attach:
        attach = cast(
            "Callable[[Path, Config, WeightTransfer, bool], PolicyServer]",
            plugins().by_scheme("policy_servers", settings.attach),
        )
        return attach(model, config, way, claims)
    check_host(settings.host)
    own = cast("type[OwnedVLLM]", plugins().get("placements", settings.placement) if settings.placement else OwnedVLLM)
    return own(model, settings, way, log=log, version=version, updates=claims, demand=demand)


def check_policy_server(config: PolicyServerConfig) -> None:
    """Raise `PluginError` if no plugin provides the configured `policy_server.weight_transfer`, `policy_server.placement` or
    `policy_server.attach`, and `ConfigError` if the last two are both set."""
    if config.attach and config.placement:
        raise ConfigError(
            f"policy_server.placement = {config.placement!r} says where to start vLLM, and policy_server.attach names a "
            "running one: leave out one of the two"
        )
    find_transfer, find_server = (
        partial(plugins().get, "weight_transfers"),
        partial(plugins().by_scheme, "policy_servers"),
    )
    urls = (config.attach,) if isinstance(config.attach, str) else config.attach
    named = [
        ("weight_transfer", config.weight_transfer, find_transfer),
        ("placement", config.placement, partial(plugins().get, "placements")),
        *(("attach", url, find_server) for url in urls),
    ]
    for setting, value, find in named:
        try:
            if value or setting == "weight_transfer":
                find(value)
        except PluginError as error:
            raise PluginError(f"policy_server.{setting} = {redacted(value)!r}: {error}") from error
