"""A worker process: runs one rollout at a time, for as long as its socket is open.

The invariant: between rollouts a worker keeps only what the agent's own modules keep (and one event loop, so that the async
clients which frameworks cache stay usable); the rollout's context and environment end with the rollout. The user's proxy
settings stay, and still hold for hosts with public names.

Only the agent's own process returns from the agent's code. A forked child (`os.fork`) that returns from it ends there, as a
program would: its output is written, the code of its `sys.exit` is kept, and one line says so.

Random generators (`random`, numpy, torch and `uuid.uuid4`) are seeded anew for each rollout. Sources of secrets are left alone
(`os.urandom`, `secrets`, `random.SystemRandom`). An attempt with a seed draws the same numbers each time it is run, as far as
its threads come in the same order; the other rollouts of its group draw other numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import ipaddress
import json
import os
import random
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from lightning.addresses import leads_to_itself
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.instrument.providers import for_rollout
from lightning.plugins import plugins
from lightning.plugins.importing import on_import
from lightning.runner import socket_framing
from lightning.runner.agent_serialization import is_installed, unpack_agent
from lightning.runner.outcomes import decode_request, encode_outcome, failed, raised, returned
from lightning.runner.protocol import Agent, Reward
from lightning.runner.stages import NO_STAGES, AttemptLine, AttemptRefusedError, enter
from lightning.runner.warmth import Contexts, built_models
from lightning.types import LLM, Outcome, Task


def _numpy(module: ModuleType, seed: int | None) -> None:
    module.seed(seed if seed is None else seed % 2**32)


def _torch(module: ModuleType, seed: int | None) -> None:
    if seed is None:
        module.seed()
    else:
        module.manual_seed(seed)


LATER: Final[dict[str, Callable[[Any, int | None], None]]] = {"numpy.random": _numpy, "torch": _torch}
"""Modules that an agent may import at any time, with the functions that seed them."""


class _Seeded:
    """Replaces `os` in the module `uuid`, so that random bytes of ids are derived from the seed.

    Replacing `uuid.uuid4` itself would not reach code that has imported that function before.
    """

    def __init__(self) -> None:
        self.generator: random.Random | None = None

    def urandom(self, size: int) -> bytes:
        """Return random bytes for the next id."""
        return os.urandom(size) if self.generator is None else self.generator.randbytes(size)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


_ids = _Seeded()
_seed: int | None = None


def seed_process(seed: int | None) -> None:
    """Seed the random generators for a rollout; None seeds them unpredictably. Forked workers share the generators' state
    before, and the rollouts of a group must not all explore the same way."""
    global _seed
    _seed = seed
    random.seed(seed)
    _ids.generator = None if seed is None else random.Random(f"uuid4 {seed}")  # noqa: S311 — ids, not secrets
    if seed is not None:
        uuid.os = _ids  # type: ignore[attr-defined]  # what `uuid4` takes its bytes from
    _seed_later()
    for name, again in LATER.items():
        if (module := _imported.get(name)) is not None:
            again(module, seed)


_imported: dict[str, ModuleType] = {}


@cache
def _seed_later() -> None:
    """Have the modules of `LATER` seeded also when they are imported later."""
    for name in LATER:
        on_import(name, lambda module, name=name: _found(name, module))  # type: ignore[misc]


def _found(name: str, module: ModuleType) -> None:
    if name not in _imported:
        _imported[name] = module
        LATER[name](module, _seed)


@contextmanager
def without_children() -> Iterator[None]:
    """A context that only this process leaves. A child forked in the block ends when it would leave the block, also by an
    exception."""
    process, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != process:
            _end(process, error)


def flush() -> None:
    """Flush the standard output and the standard error of this process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the agent may have put anything there or closed it, or nobody reads it any more
            stream.flush()


def _end(parent: int, error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    try:
        how = "returned from" if error is None else f"raised {type(error).__name__} out of"
        said = "" if error is None else "".join(traceback.format_exception(error))
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            said = "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"
        sys.stderr.write(
            f"{said}lightning: process {os.getpid()}, which the agent forked in process {parent}, {how} the agent's code and "
            "was ended: the agent's own process alone gives the reward. End such a child with os._exit()\n"
        )
    finally:
        try:
            flush()
        finally:
            os._exit(code & 0xFF)


def serve(
    sock: socket.socket,
    shipped: bytes,
    adapters: Sequence[str] | None,
    reroute: Sequence[str],
    contexts: Contexts,
    needs: int | None = None,
    line: AttemptLine = NO_STAGES,
) -> None:
    """Answer requests, each under its name, until the parent closes the socket. After the first one, write to the descriptor
    `needs` which modules were imported and what was built since the fork, as a line of JSON."""
    before = set() if needs is None else set(sys.modules)  # to refer to a thousand names copies the pages they are in
    places = list(sys.path)
    seed_process(None)  # until a rollout has a seed of its own: what the agent's modules draw when they are imported
    contexts.install()
    with without_children():
        agent = unpack_agent(shipped)
    install_tap(reroute)
    plugins().install_adapters(emit, adapters)
    with asyncio.Runner() as loop:
        while (request := socket_framing.receive(sock)) is not None:
            name, request = request[: socket_framing.NAME], request[socket_framing.NAME :]
            task, llm = decode_request(request)
            seed_process(llm.seed)
            outcome = run_agent(agent, task, llm, loop, line)
            flush()
            try:
                reply = encode_outcome(outcome, line.noted(outcome))
            except AttemptRefusedError as error:
                reply = encode_outcome(failed(error.fault, str(error), seconds=outcome.seconds))
            socket_framing.send(sock, name + reply)
            if needs is not None:
                _tell_needs(needs, before, places, contexts)
                needs = None


def _tell_needs(descriptor: int, before: set[str], places: Sequence[str], contexts: Contexts) -> None:
    found = [name for name, module in list(sys.modules.items()) if name not in before and module is not None]
    same = {top: _found_in(places, top) for top in {name.partition(".")[0] for name in found}}
    new = [name for name in found if same[name.partition(".")[0]] and _has_no_state_of_a_rollout(name)]
    needs = {"modules": new, "models": built_models(), "contexts": contexts.told()}
    with contextlib.suppress(OSError), os.fdopen(descriptor, "wb") as told:  # the fork server may be gone
        told.write(json.dumps(needs).encode() + b"\n")


def _has_no_state_of_a_rollout(name: str) -> bool:
    """Whether a module is a library's, or lightning's. A module of the user may keep state of one rollout, such as a generator
    of random numbers."""
    return name.startswith("lightning") or is_installed(getattr(sys.modules.get(name), "__file__", None))


def _found_in(places: Sequence[str], name: str) -> bool:
    """Return whether a process with this path finds the same module under this name. Agents may add their own folders to the
    path."""
    there, here = PathFinder.find_spec(name, places), getattr(sys.modules.get(name), "__spec__", None)
    if there is None or here is None:
        return True  # it is built in, or a finder of its own knows it
    if here.has_location:
        return bool(there.origin == here.origin)
    return list(there.submodule_search_locations or ()) == list(here.submodule_search_locations or ())


def run_agent(agent: Agent, task: Task, llm: LLM, loop: asyncio.Runner, line: AttemptLine = NO_STAGES) -> Outcome:
    """Run one attempt inside the contexts that plugins' stages put around it. An exception of the agent, `SystemExit` included,
    becomes its outcome."""
    started = time.monotonic()
    with _environment(llm), activate(llm, alone=True) as attempt:
        context = contextvars.copy_context()  # what the agent sets there ends with the rollout
        contexts = ExitStack()
        try:
            try:
                context.run(enter, contexts, line.around(task, llm), llm)
                return _outcome(agent, task, llm, attempt, loop, context)
            finally:
                context.run(contexts.close)
        except AttemptRefusedError as error:
            return failed(error.fault, str(error), attempt, time.monotonic() - started)


def _outcome(
    agent: Agent, task: Task, llm: LLM, attempt: ActiveAttempt, loop: asyncio.Runner, context: contextvars.Context
) -> Outcome:
    started = time.monotonic()
    try:
        result = _call(agent, task, llm, attempt, loop, context)
        return returned(result, attempt, time.monotonic() - started)
    except BaseException as error:  # noqa: BLE001 — isolates the user's agent, and the object that it returned
        return raised(error, attempt, time.monotonic() - started)


def _call(
    agent: Agent, task: Task, llm: LLM, attempt: ActiveAttempt, loop: asyncio.Runner, context: contextvars.Context
) -> object:
    if is_async(agent):
        return loop.run(in_loop(partial(agent, task, llm), attempt), context=context)
    with without_children():
        result = context.run(agent, task, llm)
    if inspect.isawaitable(result):
        return loop.run(in_loop(lambda: result, attempt), context=context)
    return result


def is_async(agent: Agent) -> bool:
    """Whether calling the agent gives a coroutine."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004 — an object is as async as its __call__


async def in_loop(start: Callable[[], Reward | Awaitable[Reward]], attempt: ActiveAttempt) -> Reward:
    """Start an agent in this task and await what it returned, if that is awaitable."""
    attempt.calls.begin()
    with without_children():  # here, since a child shares the selector of the loop
        result = start()
        return await result if inspect.isawaitable(result) else result


@contextlib.contextmanager
def _environment(llm: LLM) -> Iterator[None]:
    """Set, for one rollout, the variables that clients of OpenAI and Anthropic read, for agents that do not use `llm`, and the
    variables that keep calls to the gateway from a proxy."""
    ours = {**for_rollout(llm.base_url, llm.api_key), **without_proxy(os.environ, llm.base_url)}
    before = {name: os.environ.get(name) for name in ours}
    _set(ours)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return `NO_PROXY` and `no_proxy` with the host of `url` added to the user's value; nothing if no proxy is set.

    A proxy cannot reach a gateway on loopback or in a private network, and must not see the keys of rollouts. A host with a
    public name may be reachable only through the proxy, so nothing is returned for it either.
    """
    # Either variable would also hide the proxy of macOS's settings.
    if not any(
        value and name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name, value in environment.items()
    ):
        return {}
    host = urlsplit(url).hostname or ""
    if not (host and (leads_to_itself(url) or _is_private(host))):
        return {}
    both = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):  # clients that know both prefer either
        theirs = environment.get(name) or environment.get(other) or ""
        listed = [each.strip() for each in theirs.split(",") if each.strip()]
        # urllib knows "*" only when it stands alone
        both[name] = theirs if "*" in listed else ",".join(dict.fromkeys((*listed, host)))
    return both


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False
