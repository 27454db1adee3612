"""A worker process: runs one rollout at a time, for as long as its socket is open.

The invariant: between rollouts a worker keeps only what the agent's own modules keep (and one event loop, so that the async
clients which frameworks cache stay usable); the rollout's context and environment end with the rollout. What the user has
said of proxies stays, and a host with a public name is reached as they said.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.machinery import PathFinder
from urllib.parse import urlsplit

from lightning.addresses import leads_to_itself
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.instrument.providers import for_rollout
from lightning.plugins import plugins
from lightning.runner import socket_framing
from lightning.runner.agent_serialization import is_installed, unpack_agent
from lightning.runner.forks import flush, without_children
from lightning.runner.outcomes import decode_request, encode_outcome, failed, raised, returned
from lightning.runner.protocol import Agent, Reward
from lightning.runner.seeding import seed_process
from lightning.runner.stages import NO_STAGES, AttemptLine, AttemptRefusedError, enter
from lightning.runner.warmth import Contexts, built_models
from lightning.types import LLM, Outcome, Task


def serve(
    sock: socket.socket,
    shipped: bytes,
    adapters: Sequence[str] | None,
    reroute: Sequence[str],
    contexts: Contexts,
    needs: int | None = None,
    line: AttemptLine = NO_STAGES,
) -> None:
    """Answer requests, each under its name, until the parent closes the socket. After the first, what it has imported and built
    since the fork is written to the descriptor `needs`, as a line of JSON."""
    before, places = set(sys.modules), list(sys.path)
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
    """Whether a module is a library's, or lightning's. The user's own may keep what belongs to one rollout, such as a generator
    of random numbers."""
    return name.startswith("lightning") or is_installed(getattr(sys.modules.get(name), "__file__", None))


def _found_in(places: Sequence[str], name: str) -> bool:
    """Whether a process that has this path finds no other module under this name: agents put folders of theirs before it."""
    there, here = PathFinder.find_spec(name, places), getattr(sys.modules.get(name), "__spec__", None)
    if there is None or here is None:
        return True  # it is built in, or a finder of its own knows it
    if here.has_location:
        return bool(there.origin == here.origin)
    return list(there.submodule_search_locations or ()) == list(here.submodule_search_locations or ())


def run_agent(agent: Agent, task: Task, llm: LLM, loop: asyncio.Runner, line: AttemptLine = NO_STAGES) -> Outcome:
    """One attempt, inside what the stages of plugins put around it. What the agent raises, `SystemExit` included, is its
    outcome."""
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
        return loop.run(_started_in_loop(agent, task, llm, attempt), context=context)
    with without_children():
        result = context.run(agent, task, llm)
    if inspect.isawaitable(result):
        return loop.run(_awaited(result, attempt), context=context)
    return result


def is_async(agent: Agent) -> bool:
    """Whether calling the agent gives a coroutine."""
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004 — an object is as async as its __call__


async def _started_in_loop(agent: Agent, task: Task, llm: LLM, attempt: ActiveAttempt) -> Reward:
    attempt.calls.begin()
    with without_children():  # here, since a child shares the selector of the loop
        result = agent(task, llm)
        return await result if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Reward], attempt: ActiveAttempt) -> Reward:
    attempt.calls.begin()
    with without_children():
        return await result


@contextlib.contextmanager
def _environment(llm: LLM) -> Iterator[None]:
    """The variables that clients of OpenAI and Anthropic read by themselves, for agents never told about `llm`, and those that
    keep calls to the gateway from a proxy."""
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
    """`NO_PROXY` and `no_proxy` with the host of `url` after what the user has there; nothing where there is no proxy.

    A proxy cannot reach a gateway on loopback or in a private network, and none is to see the keys of rollouts. One that has a
    public name may be reached through the proxy alone, and stays as it is.
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
