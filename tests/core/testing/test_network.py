"""The network is held to the loopback address, and given back."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from lightning.testing import ChatServer, NetworkHeldError, hold_network
from lightning.testing.network import is_local

OUTSIDE = "203.0.113.7"  # reserved for documentation: nobody is there


def test_what_leaves_the_machine_is_refused_and_named() -> None:
    with hold_network() as refused:
        with socket.socket() as sock, pytest.raises(NetworkHeldError, match=r"wants to reach 203\.0\.113\.7"):
            sock.connect((OUTSIDE, 443))
        with socket.socket() as sock, pytest.raises(NetworkHeldError):
            sock.connect_ex((OUTSIDE, 443))
        with pytest.raises(NetworkHeldError, match=r"api\.example\.com"):
            socket.getaddrinfo("api.example.com", 443)
        with socket.socket(socket.AF_INET6) as sock, pytest.raises(NetworkHeldError):
            sock.connect(("2001:db8::1", 443))
        with pytest.raises(httpx.ConnectError):
            httpx.get("http://api.example.com/")
    assert refused == [OUTSIDE, OUTSIDE, "api.example.com", "2001:db8::1", "api.example.com"]


async def test_an_event_loop_is_held_too() -> None:
    with hold_network() as refused, pytest.raises(NetworkHeldError):
        await asyncio.open_connection("api.example.com", 443)
    assert refused == ["api.example.com"]


def test_loopback_and_unix_sockets_go_on(tmp_path: Path) -> None:
    with hold_network() as refused, ChatServer() as server:
        reply = httpx.post(f"{server.llm().base_url}/chat/completions", json={"messages": []})
        assert reply.status_code == 200
        assert socket.getaddrinfo("localhost", 80)
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
            listener.bind(path)
            listener.listen()
            sock.connect(path)
    assert refused == []


def test_afterwards_everything_is_as_before() -> None:
    before = (dict(vars(socket.socket)), socket.getaddrinfo)
    with hold_network(), hold_network():
        assert socket.getaddrinfo is not before[1]
    assert (dict(vars(socket.socket)), socket.getaddrinfo) == before


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::1%lo", True),
        (b"localhost", True),
        (None, True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("fe80::1%eth0", False),
    ],
)
def test_what_is_local(host: object, local: bool) -> None:
    assert is_local(host) is local


def test_the_error_survives_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(NetworkHeldError("a.example")))) == str(NetworkHeldError("a.example"))


PLUGIN_TESTS = """
import socket
import httpx

def test_holds(loopback_only):
    try:
        socket.getaddrinfo("a.example", 80)
    except OSError:
        loopback_only.remove("a.example")

def test_tells(loopback_only):
    try:
        socket.getaddrinfo("b.example", 80)
    except OSError:
        pass

def test_serves(chat_server):
    body = {"messages": [{"content": "hi"}]}
    httpx.post(f"{chat_server.llm().base_url}/chat/completions", json=body)
    assert chat_server.calls[0].text == "hi"

def test_swallows():
    try:
        socket.getaddrinfo("127.0.0.999.invalid", 80)
    except OSError:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "failed"), [((), ["test_tells"]), (("--loopback-only",), ["test_tells", "test_swallows"])]
)
def test_the_plugin(tmp_path: Path, options: tuple[str, ...], failed: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(PLUGIN_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lightning.testing.pytest_plugin", *options, "test_it.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # only ours
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    told = [
        line.split("::")[1].split(" ")[0] for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    assert told == failed, ran.stdout + ran.stderr
