"""Redis killed, its answers lost, its memory full: nothing acknowledged is lost, and nothing takes effect twice."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from lightning.errors import StoreError, UnavailableError
from lightning.types import Outcome, Rollout, Run, Scope, Status, Task, Transition
from lightning_redis import pipeline as lanes
from lightning_redis.store import RedisStore
from lightning_resources.nouns import Resource
from lightning_resources.operations import alias_history, put_resource, roll_back_alias, set_alias
from lightning_server.tokens import Token, put_token, revoke_token

from tests.core.store.test_machine import StoreMachine
from tests.servers.redis import RedisServer
from tests.servers.redis_proxy import LossyProxy

RolloutOf = Callable[..., Rollout]
CallOf = Callable[..., Transition]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with RedisServer(tmp_path) as server:
        yield server


async def opened(url: str) -> RedisStore:
    store = RedisStore.from_url(url)
    await store.open()
    await store.put_run(Run("run", "run"))
    return store


# answers that are lost ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_order_of_operations_over_a_wire_that_loses_answers(redis_server: RedisServer) -> None:
    """The very same machine: what is sent again must be answered as it was before, and change nothing."""
    with LossyProxy(redis_server.port, chance=0.4) as proxy:
        count = iter(range(10_000))

        def make() -> RedisStore:
            return RedisStore.from_url(f"redis://127.0.0.1:{proxy.port}?prefix=lossy-{next(count)}&timeout=60")

        machine = type("Machine", (StoreMachine,), {"make_store": staticmethod(make)})
        run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
    assert proxy.lost > 20


async def test_each_change_takes_effect_once_when_answers_are_lost(
    redis_server: RedisServer, rollout: RolloutOf, call: CallOf
) -> None:
    with LossyProxy(redis_server.port, chance=0.3, seed=1) as proxy:
        store = await opened(f"redis://127.0.0.1:{proxy.port}?prefix=half&timeout=60")
        assert await store.create_rollouts([rollout(name) for name in "abc"]) == 3
        assert [lease.attempt for lease in await store.lease("run", "w1", limit=2)] == [1, 1]
        assert await store.append([call(0), call(1, [1, 2, 3, 4, 5])]) == 2
        assert (await store.complete("a", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED
        assert await store.release("w1") == 1
        (lease,) = await store.lease("run", "w2")
        assert (lease.rollout.id, lease.attempt) == ("b", 2)
        token = await put_token(store, Token("t", Scope.RUNNER, "d"))
        assert (await revoke_token(store, "t")).created_at == token.created_at
        for text in ("one", "two", "three"):
            await put_resource(store, Resource("w", text))
        for version in (1, 2, 3):
            await set_alias(store, "w", "production", version)
        assert (await roll_back_alias(store, "w", "production")).version == 2
        assert [move.version for move in await alias_history(store, "w", "production")] == [1, 2, 3, 2]
        assert await store.keep_state("run", "k", 1) == await store.keep_state("run", "k", 2) == 1
        await store.close()
    assert proxy.lost > 3
    again = await opened(redis_server.url("prefix=half"))
    found = (await again.list_rollouts("run")).items
    assert [(r.status, r.attempt) for r in found] == [
        (Status.SUCCEEDED, 1),
        (Status.RUNNING, 2),
        (Status.PENDING, 0),
    ]
    assert [t.seq for t in await again.transitions("a")] == [0, 1]
    await again.close()


async def test_a_lease_that_was_lost_before_it_was_heard_of_is_not_given_twice(
    redis_server: RedisServer, rollout: RolloutOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, the lease runs out, another worker takes the rollout: only then the first call is sent again."""
    with LossyProxy(redis_server.port) as proxy:
        store = await opened(f"redis://127.0.0.1:{proxy.port}?prefix=late&timeout=60")
        other = await opened(redis_server.url("prefix=late"))
        await store.create_rollouts([rollout()])
        held = asyncio.Event()

        async def until_then(_: float) -> None:
            await held.wait()

        monkeypatch.setattr(lanes.asyncio, "sleep", until_then)
        proxy.chance = 1.0
        waiting = asyncio.create_task(store.lease("run", "w1", ttl=0))
        while not proxy.lost:
            await asyncio.wait([waiting], timeout=0.01)
        (taken,) = await other.lease("run", "w2")
        assert taken.attempt == 2
        proxy.chance = 0.0
        held.set()
        assert await waiting == []
        await store.close()
        await other.close()


async def test_a_value_whose_answer_was_lost_does_not_replace_a_newer_one(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, another process writes, and only then the first call is sent again."""
    with LossyProxy(redis_server.port) as proxy:
        store = await opened(f"redis://127.0.0.1:{proxy.port}?prefix=newer&timeout=60")
        other = await opened(redis_server.url("prefix=newer"))
        written = asyncio.Event()

        async def until_then(_: float) -> None:
            await written.wait()

        monkeypatch.setattr(lanes.asyncio, "sleep", until_then)
        proxy.chance = 1.0
        waiting = asyncio.create_task(store.put_state("run", "k", "older"))
        while not proxy.lost:
            await asyncio.wait([waiting], timeout=0.01)
        await other.put_state("run", "k", "newer")
        proxy.chance = 0.0
        written.set()
        await waiting
        assert await store.get_state("run", "k") == "newer"
        await store.close()
        await other.close()


# a server that goes away ----------------------------------------------------------------------------------------

APPEND = """
    import asyncio, os, sys
    from lightning_redis.store import RedisStore
    from lightning.types import Rollout, Task, Transition, logprobs, token_ids

    async def main(url):
        store = RedisStore.from_url(url)
        await store.open()
        names = [f"r{i}" for i in range(8)]
        await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in names])
        await store.lease("run", "w", limit=8, ttl=3600)

        async def agent(name):
            prompt = list(range(500))
            for seq in range(100_000):
                answer = [seq, hash(name) % 1000] * 20
                await store.append([Transition(name, 1, seq, "c", token_ids(prompt), token_ids(answer), logprobs([-1.0] * 40))])
                os.write(1, f"{name} {seq}\\n".encode())
                prompt = prompt[:500] + answer

        await asyncio.gather(*(agent(name) for name in names))

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("appendfsync", ["always", "no"])
async def test_what_was_acknowledged_survives_kill_9_of_redis_and_the_writers_go_on(
    own_server: RedisServer, appendfsync: str
) -> None:
    server = own_server
    server.command("CONFIG", "SET", "appendfsync", appendfsync)
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(APPEND), server.url("timeout=60")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    lines: list[str] = []
    rng = random.Random(appendfsync)
    try:
        for _ in range(3):
            lines += [writer.stdout.readline() for _ in range(rng.randint(50, 150))]
            server.kill()
            server.start("--appendfsync", appendfsync)
        lines += [writer.stdout.readline() for _ in range(50)]
    finally:
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        error = writer.stderr.read()
        writer.wait(30)
        writer.stdout.close()
        writer.stderr.close()
    acknowledged = {(name, int(seq)) for name, seq in (line.split() for line in lines if line.endswith("\n"))}
    assert len(acknowledged) > 150, error
    server.kill()
    server.start("--appendfsync", appendfsync)
    store = await opened(server.url())
    stored = await store.transitions_of([(f"r{i}", 1) for i in range(8)])
    assert acknowledged <= {(t.rollout, t.seq) for calls in stored for t in calls}
    for calls in stored:
        assert [t.seq for t in calls] == list(range(len(calls)))
    await store.close()


async def test_a_call_waits_while_redis_is_away_and_is_refused_when_it_stays_away(own_server: RedisServer) -> None:
    store, hasty = await opened(own_server.url()), await opened(own_server.url("timeout=0.1"))
    own_server.kill()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await hasty.put_state("run", "k", 0)
    waiting = asyncio.create_task(store.put_state("run", "k", 1))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    await asyncio.to_thread(own_server.start)
    await waiting
    assert await hasty.get_state("run", "k") == 1
    await store.close()
    await hasty.close()


async def test_another_database_in_its_place_is_not_written_to(own_server: RedisServer) -> None:
    store = await opened(own_server.url("timeout=5"))
    own_server.kill()
    for file in own_server.folder.iterdir():
        file.unlink()
    own_server.start()
    for ask in (store.put_state("run", "k", 1), store.get_state("run", "k")):
        with pytest.raises(StoreError, match="is not the database that was opened"):
            await ask
    assert own_server.command("DBSIZE") == b":0\r\n"
    await store.close()


async def test_a_server_that_comes_back_less_durable_is_not_written_to(own_server: RedisServer) -> None:
    """CONFIG SET without the line in redis.conf: the setting is gone after a restart."""
    store = await opened(own_server.url("timeout=5"))
    own_server.kill()
    own_server.start("--appendfsync", "everysec")
    with pytest.raises(StoreError, match="appendfsync everysec"):
        await store.put_state("run", "k", 1)
    own_server.command("CONFIG", "SET", "appendfsync", "always")
    await store.put_state("run", "k", 1)
    await store.close()


async def test_close_gives_up_what_cannot_be_sent(own_server: RedisServer) -> None:
    store = await opened(own_server.url("timeout=0.3"))
    own_server.kill()
    waiting = asyncio.create_task(store.put_state("run", "k", 1))
    await asyncio.sleep(0)
    await asyncio.wait_for(store.close(), 10)
    with pytest.raises(UnavailableError):
        await waiting


async def test_a_server_that_becomes_a_replica_is_waited_for(own_server: RedisServer) -> None:
    """As in a failover: until another takes over, or this one again, it may be read but not written."""
    store, hasty = await opened(own_server.url()), await opened(own_server.url("timeout=0.1"))
    own_server.command("REPLICAOF", "127.0.0.1", str(own_server.port))
    with pytest.raises(UnavailableError, match="replica"):
        await hasty.put_state("run", "k", 0)
    waiting = asyncio.create_task(store.put_state("run", "k", 1))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    own_server.command("REPLICAOF", "NO", "ONE")
    await waiting
    assert await hasty.get_state("run", "k") == 1
    await store.close()
    await hasty.close()


async def test_scripts_that_redis_forgot_are_told_again(redis_server: RedisServer) -> None:
    store = await opened(redis_server.url("prefix=flushed"))
    for number in range(3):
        redis_server.command("SCRIPT", "FLUSH")
        await store.put_state("run", "k", number)
    assert await store.get_state("run", "k") == 2
    await store.close()


# memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_full_memory_loses_nothing_and_goes_on_when_there_is_space(
    own_server: RedisServer, call: CallOf, rollout: RolloutOf
) -> None:
    store = await opened(own_server.url())
    await store.create_rollouts([rollout()])
    await store.lease("run", "w", ttl=3600)
    own_server.command("CONFIG", "SET", "maxmemory", str(own_server.used_memory() + 200_000))
    calls = [call(i, random.Random(i).sample(range(150_000), 2000)) for i in range(60)]
    results = []
    for each in calls:
        results += await asyncio.gather(store.append([each]), return_exceptions=True)
    acknowledged = [each for each, result in zip(calls, results, strict=True) if result == 1]
    errors = [result for result in results if result != 1]
    assert acknowledged
    assert errors
    assert all(type(error) is StoreError and "out of memory" in str(error) for error in errors)
    assert await store.transitions("a") == acknowledged
    own_server.command("CONFIG", "SET", "maxmemory", "0")
    assert sum(await asyncio.gather(*(store.append([each]) for each in calls))) == len(errors)
    assert await store.transitions("a") == calls
    await store.close()


# watching -------------------------------------------------------------------------------------------------------


async def test_a_change_of_another_process_is_heard_soon(redis_server: RedisServer) -> None:
    store, other = (
        await opened(redis_server.url("prefix=watched")),
        await opened(redis_server.url("prefix=watched")),
    )
    async with store.watch("run") as watch, store.watch("run") as second:
        waiting = [asyncio.create_task(each.wait(30)) for each in (watch, second)]
        await asyncio.wait(waiting, timeout=0.2)
        await other.put_state("run", "k", 1)
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [True, True]
        assert not await watch.wait(0)
    with store._link() as link:
        assert link.listeners._by_stream == {}
    await store.close()
    await other.close()


@pytest.mark.slow
async def test_a_change_while_the_connection_is_lost_is_heard(redis_server: RedisServer) -> None:
    store, other = await opened(redis_server.url("prefix=cut")), await opened(redis_server.url("prefix=cut"))
    async with store.watch("run") as watch:
        for number in range(5):
            waiting = asyncio.create_task(watch.wait(30))
            await asyncio.wait([waiting], timeout=0.05)
            redis_server.command("CLIENT", "KILL", "TYPE", "normal")
            await other.put_state("run", "k", number)
            assert await asyncio.wait_for(waiting, 120)
    await store.close()
    await other.close()


# several processes ----------------------------------------------------------------------------------------------

WORK = """
    import asyncio, random, sys
    from lightning_redis.store import RedisStore
    from lightning.types import Outcome

    async def main(url, worker):
        store = RedisStore.from_url(url)
        await store.open()
        rng = random.Random(worker)
        while held := await store.lease("run", worker, limit=rng.randint(1, 4), ttl=3600):
            for lease in held:
                print("leased", lease.rollout.id, lease.attempt)
                if rng.random() < 0.2:
                    continue  # never finished: taken back at the end
                await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
                print("done", lease.rollout.id, lease.attempt)
        await store.close()

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_many_processes_never_hold_one_attempt_twice(redis_server: RedisServer) -> None:
    url = redis_server.url("prefix=many")
    store = await opened(url)
    wanted = [f"r{i}" for i in range(100)]
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in wanted])
    workers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORK), url, f"w{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3
    events = [tuple(line.split()) for out in outputs for line in out.splitlines()]
    leased = Counter((name, attempt) for event, name, attempt in events if event == "leased")
    assert set(leased) == {(name, "1") for name in wanted}
    assert set(leased.values()) == {1}
    done = {name for event, name, _ in events if event == "done"}
    assert sum([await store.release(f"w{i}") for i in range(3)]) == len(wanted) - len(done)
    rollouts = (await store.list_rollouts("run")).items
    assert {r.id for r in rollouts if r.status is Status.SUCCEEDED} == done
    assert {r.id for r in rollouts if r.status is Status.PENDING} == set(wanted) - done
    await store.close()


def test_a_loop_that_ends_takes_its_connections_along(redis_server: RedisServer) -> None:
    """Threads with loops of their own come and go while a gateway runs."""
    store = RedisStore.from_url(redis_server.url("prefix=loops"))
    asyncio.run(store.open())

    def clients() -> int:
        return redis_server.command("CLIENT", "LIST", "TYPE", "normal").count(b"addr=")

    before = clients()
    for number in range(3):
        thread = threading.Thread(target=lambda n=number: asyncio.run(store.put_state("run", "k", n)))  # type: ignore[misc]
        thread.start()
        thread.join(30)
    deadline = time.monotonic() + 10
    while clients() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert clients() <= before
    assert asyncio.run(store.get_state("run", "k")) == 2
    asyncio.run(store.close())
