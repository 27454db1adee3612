"""Ports, groups of processes and logs, with small stand-ins for vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from lightning.errors import PolicyServerError
from lightning.policy_server import launch
from lightning.policy_server import vllm_server as process_module
from lightning.policy_server.launch import OWNED
from lightning.policy_server.vllm_server import ServerProcess, reserved_port


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ServerProcess]:
    """Run a script in place of the launcher."""
    real = subprocess.Popen

    def start(script: str, cures: Sequence[tuple[str, str]] = ()) -> ServerProcess:
        def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
            assert command[1:4] == ["-P", "-m", "lightning.policy_server.launch"]
            return real([sys.executable, "-c", script], **options)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(process_module.subprocess, "Popen", popen)
        return ServerProcess([], dict(os.environ), tmp_path / "logs" / "vllm.log", cures)

    return start


def test_a_reserved_port_is_free_for_the_server_and_for_nobody_else() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            server.bind(("127.0.0.1", port))
            server.listen()
            client.connect(("127.0.0.1", port))
            server.accept()[0].close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                PolicyServerError, match=rf"127\.0\.0\.1:{port} \(Address already in use\).*policy_server\.port"
            ),
            reserved_port("127.0.0.1", port),
        ):
            pass


async def test_stop_ends_the_whole_group(run: Callable[[str], ServerProcess], tmp_path: Path) -> None:
    child = tmp_path / "child"
    process = run(
        "import os, signal, subprocess, sys, time\n"
        "sleep = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
        "pid = subprocess.Popen([sys.executable, '-c', sleep]).pid\n"
        f"open({str(child)!r} + '.new', 'w').write(str(pid)); os.rename({str(child)!r} + '.new', {str(child)!r})\n"
        "time.sleep(600)\n"
    )
    await asyncio.to_thread(wait_for, child.exists)
    pid = int(child.read_text())
    assert process.returncode is None
    await process.stop()
    assert process.returncode == -signal.SIGTERM
    await asyncio.to_thread(wait_for, lambda: gone(pid))
    await process.stop()


async def test_stop_is_forceful_with_what_does_not_listen(run: Callable[[str], ServerProcess], tmp_path: Path) -> None:
    process = run(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    await asyncio.to_thread(wait_for, lambda: b"up" in process.log.read_bytes())
    await process.stop(patience=0.2)
    assert process.returncode == -signal.SIGKILL


def test_explain_finds_the_first_error_and_the_last_lines(run: Callable[[str], ServerProcess], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "vllm.log").write_text("OSError: of an earlier start\n")
    process = run(
        "print('(APIServer) WARNING 11-23 14:05:00 This can cause errors like `OSError: [Errno 24] Too many open files`')\n"
        "print('(EngineCore pid=1) ERROR 11-23 14:05:01 ValueError: head size 24 is not supported (see VLLM_LOG=INFO)')\n"
        "[print('line', i) for i in range(30)]\n"
        "print('RuntimeError: Engine core initialization failed. See root cause above.')"
    )
    wait_for(lambda: process.returncode is not None)
    text = process.explain()
    assert text.startswith("ValueError: head size 24 is not supported (see VLLM_LOG=INFO). The last lines of ")
    assert "earlier start" not in text
    assert "| line 29" in text
    assert "| line 3\n" not in text


def test_explain_says_what_helps_where_the_way_of_the_weights_knows_it(run: Callable[..., ServerProcess]) -> None:
    cures = [("does not support [a-z]+", "Take none"), ("ValueError", "Take another value")]
    for said, cure in (("a model does not support this", "Take none"), ("too many", "Take another value")):
        process = run(f"print({f'(EngineCore pid=1) ERROR 11-23 14:05:01 ValueError: {said}'!r})", cures)
        wait_for(lambda process=process: process.returncode is not None)  # type: ignore[misc]
        assert process.explain().startswith(f"ValueError: {said}. {cure}. The last lines of ")


def test_explain_of_silence(run: Callable[[str], ServerProcess]) -> None:
    process = run("")
    wait_for(lambda: process.returncode is not None)
    assert "nothing was written" in process.explain()


WATCHED = (
    "import os, subprocess, sys, time\n"
    "script = 'import os, time; from lightning.policy_server.launch import watch_owner; '"
    f" 'watch_owner(int(os.environ[\"{OWNED}\"])); print(os.getpid(), flush=True); time.sleep(600)'\n"
    f"env = {{**os.environ, '{OWNED}': str(os.getpid())}}\n"
    "subprocess.Popen([sys.executable, '-c', script], env=env, start_new_session=True)\n"
    "time.sleep(600)\n"
)


def test_a_watched_group_ends_with_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid)
        owner.kill()
    wait_for(lambda: gone(pid))


FORKING = """
import multiprocessing, os, socket, sys
from lightning.policy_server.launch import fork_engine

fork_engine()
bound = socket.socket()
bound.bind(("127.0.0.1", 0))  # it listens later
from multiprocessing import get_context  # as torch.multiprocessing has it: a name of its own

def engine():
    import psutil
    assert not psutil.Process().net_connections("inet"), "the port is free as soon as the server has ended"
    bound.close()
    print([asked("spawn").get_start_method() for asked in (get_context, multiprocessing.get_context)], flush=True)
    if not os.fork():
        os._exit(0)
    os.wait()

print(get_context("spawn").get_start_method(), get_context("forkserver").get_start_method(), flush=True)
process = get_context("spawn").Process(target=engine)
process.start()
process.join()
bound.listen()
assert socket.create_connection(bound.getsockname()), "the server has its socket still"
"""


def test_the_servers_engine_is_forked_and_nothing_that_the_engine_starts() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["fork forkserver", "['spawn', 'spawn']"]
    assert ran.stderr == f"{launch.COPIED}\n"


@pytest.mark.parametrize(
    ("args", "forks"),
    [
        ([], True),
        (["--max-model-len", "64"], True),
        (["--numa-bind"], False),
        (["--data_parallel_size=2"], False),
        (["-dp", "2"], False),
        (["--api-server-count", "2"], False),
    ],
)
def test_a_server_that_starts_more_than_its_engine_spawns_it(
    args: list[str], forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[bool] = []
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", SimpleNamespace(main=lambda: forked.append(False)))
    monkeypatch.setattr(launch, "fork_engine", lambda: forked.append(True))
    monkeypatch.setenv(launch.FORKED, "1")
    monkeypatch.delenv(OWNED, raising=False)
    monkeypatch.setattr(sys, "argv", ["launch", "serve", "model", *args])
    launch.main()
    assert forked == [True, False][not forks :]


ENGINE = (
    "import multiprocessing, os, time\n"
    "def engine():\n"
    "    from lightning.policy_server.launch import die_with_parent\n"
    "    die_with_parent()\n"
    "    print(os.getpid(), flush=True)\n"
    "    time.sleep(600)\n"
    "multiprocessing.get_context('fork').Process(target=engine).start()\n"
    "time.sleep(600)\n"
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux")
def test_the_kernel_kills_an_engine_whose_server_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    wait_for(lambda: gone(pid))
