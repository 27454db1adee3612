"""A fork server that is busy: nothing that it is told is lost, however much that is, and nobody waits for one that is gone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from unittest.mock import Mock

import psutil
import pytest
from lightning.runner import forkserver, socket_framing
from lightning.runner.forkserver import FORKS, ForkServer, Worker, WorkerDiedError, _Incoming
from lightning.runner.forkserver_main import FIRST_ALONE, _Template

NOBODY = 1 << 23
"""Above every process id that Linux gives."""


class Busy:
    """A `ForkServer` whose process is played by the test, which reads when it likes; the socket holds a few commands."""

    def __init__(self) -> None:
        self.server = ForkServer(b"", enclosure=Mock(environment={}, inside=None))  # no process group out here is meant
        ours, self.other = socket.socketpair()
        for end in (ours, self.other):
            end.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.server._control = ours
        self.server._listener = asyncio.create_task(self.server._listen(_Incoming(ours)))
        self._buffer = bytearray()

    async def hear(self) -> list[dict[str, int]]:
        """The commands that have come when no more is coming."""
        found, quiet = [], 0
        while quiet < 20:
            try:
                data, passed, _, _ = socket.recv_fds(self.other, 65536, 64)
            except BlockingIOError:
                quiet += 1
                await asyncio.sleep(0)
                continue
            quiet = 0
            for descriptor in passed:
                socket.close(descriptor)
            self._buffer += data
            while (message := socket_framing.unpack(self._buffer)) is not None:
                found.append(json.loads(message))
        return found

    async def answer(self, commands: list[dict[str, int]]) -> None:
        loop = asyncio.get_running_loop()
        for command in commands:
            forked = {"forked": command["fork"], "pid": NOBODY + command["fork"]}
            await loop.sock_sendall(self.other, socket_framing.pack(json.dumps(forked).encode()))

    def kill(self, count: int) -> list[dict[str, int]]:
        """Kill so many workers; returns the commands that must arrive."""
        for number in range(count):
            exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self.server.kill(Worker(NOBODY + number, exited, Mock(), Mock()))
        return [{"kill": NOBODY + number} for number in range(count)]


@pytest.fixture
async def busy() -> AsyncIterator[Busy]:
    made = Busy()
    yield made
    await made.server.close()
    made.other.close()


async def some_passes() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_more_forks_than_the_socket_holds_are_all_made(busy: Busy) -> None:
    forking = [asyncio.create_task(busy.server.fork()) for _ in range(3 * FORKS)]
    await some_passes()
    asked = await busy.hear()
    assert len(asked) == FORKS, "so many descriptors are on their way, and no more"
    while asked:
        await busy.answer(asked)
        asked = await busy.hear()
    workers = await asyncio.wait_for(asyncio.gather(*forking), 30)
    assert {worker.pid for worker in workers} == {NOBODY + number for number in range(3 * FORKS)}
    for worker in workers:
        worker.hang_up()


async def test_every_kill_arrives_when_there_is_room_again(busy: Busy) -> None:
    expected = busy.kill(200)
    await some_passes()
    assert await busy.hear() == expected


async def test_who_no_longer_waits_for_room_leaves_nothing_behind(busy: Busy) -> None:
    expected = busy.kill(100)
    await some_passes()
    before = psutil.Process().num_fds()
    forking = [asyncio.create_task(busy.server.fork()) for _ in range(2 * FORKS)]
    await some_passes()
    for task in forking:
        task.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*forking, return_exceptions=True)
    )
    assert psutil.Process().num_fds() == before
    assert await busy.hear() == expected
    later = asyncio.create_task(busy.server.fork())
    await some_passes()
    await busy.answer(await busy.hear())
    (await asyncio.wait_for(later, 30)).hang_up()


@pytest.mark.parametrize("ends", ["the fork server", "the runner"])
async def test_nobody_waits_for_a_fork_server_that_is_gone(busy: Busy, ends: str) -> None:
    busy.kill(100)
    await some_passes()
    forking = [asyncio.create_task(busy.server.fork()) for _ in range(2 * FORKS)]
    await some_passes()
    if ends == "the fork server":
        busy.other.close()
    else:
        await busy.server.close()
    found = await asyncio.wait_for(asyncio.gather(*forking, return_exceptions=True), 30)
    assert all(isinstance(error, WorkerDiedError) for error in found), found
    assert not busy.server._kills


def test_agents_do_not_see_what_leads_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The password of a deployment's store is taken away; one that is the agent's own tools' is not."""
    monkeypatch.delenv("LIGHTNING_STORE", raising=False)
    monkeypatch.setenv("PGPASSWORD", "word")
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_secret")
    assert forkserver._environment()["PGPASSWORD"] == "word"
    monkeypatch.setenv("LIGHTNING_STORE", "postgresql://me@db/x")
    assert not {"PGPASSWORD", "LIGHTNING_STORE", "LIGHTNING_TOKEN"} & forkserver._environment().keys()


class Template(_Template):
    """A fork server that notes which requests it has forked a worker for."""

    def __init__(self, requests: int, cores: int) -> None:
        self._asked = deque((request, -1) for request in range(requests))
        self._children, self._reporter, self._until, self._early = set(), 0, 0.0, cores
        self.forked: list[int] = []

    def _fork(self, request: int, descriptor: int) -> None:
        self.forked.append(request)
        self._children.add(NOBODY + request)
        self._reporter = self._reporter or NOBODY + request


def test_workers_wait_for_the_imports_of_the_first_rollout_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would import them for itself, all on the same cores."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    template = Template(8, cores=3)
    template._fork_asked()
    assert template.forked == [0, 1, 2], "as many as there are cores"
    template._children.remove(NOBODY + 2)
    template._fork_asked()
    assert template.forked == [0, 1, 2, 3], "a core is free again"
    template._reporter = -1
    template._fork_asked()
    assert template.forked == list(range(8)), "the first rollout has told its imports"

    late = Template(8, cores=3)
    late._fork_asked()
    late._reporter = 0  # it died: another worker is to tell, and the time goes on
    now += FIRST_ALONE
    late._fork_asked()
    assert late.forked == list(range(8))
