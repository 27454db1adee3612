"""What is particular to PostgreSQL: lost answers, lost servers, lost clients, notifications, foreign and newer schemas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from lightning.errors import ConflictError, DataError, SchemaError, StoreError, UnavailableError
from lightning.gateway.identity import TokenSigner
from lightning.store.relational import operations
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.store.threads import Bell
from lightning.types import Outcome, Rollout, Run, Scope, Status, Task, Transition, logprobs, token_ids
from lightning_db.keeper import keeper_of
from lightning_otel.traces.book import TraceBook
from lightning_postgres import change_listener as postgres_watching
from lightning_postgres import connection as postgres_connection
from lightning_postgres import connections
from lightning_postgres.connection import lock_key
from lightning_postgres.store import PostgresStore
from lightning_resources.nouns import Resource
from lightning_resources.operations import alias_history, put_resource, roll_back_alias, set_alias
from lightning_server import tokens_sql
from lightning_server.fleet.member import Member
from lightning_server.fleet.owner import Owner
from lightning_server.fleet.records import Seat, from_json, seat_key
from lightning_server.tokens import Token, list_tokens, put_token

from tests.servers.postgres import USER, PostgresServer

pytestmark = pytest.mark.slow
CallOf = Callable[..., Transition]
RolloutOf = Callable[..., Rollout]


@pytest.fixture
async def store(postgres_url: Callable[[], str]) -> AsyncIterator[PostgresStore]:
    """An open store with the run `run`."""
    made = PostgresStore.from_url(postgres_url())
    await made.open()
    await made.put_run(Run("run", "a run"))
    yield made
    await made.close()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    with PostgresServer() as server:
        yield server


async def direct(store: PostgresStore) -> asyncpg.Connection:
    """A connection of another program to the store's schema."""
    where = store._settings
    return await asyncpg.connect(
        host=where.host,
        port=where.port,
        user=where.user,
        database=where.database,
        ssl=False,
        server_settings={"search_path": where.schema},
    )


# lost answers ---------------------------------------------------------------------------------------------------


class Loses:
    """A connection whose next COMMIT is `done`, or not, before its answer is lost."""

    def __init__(self, connection: Any, done: bool) -> None:
        self.connection, self.done, self.lost = connection, done, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    async def execute(self, sql: str, *values: object) -> object:
        if not sql.endswith("COMMIT"):
            return await self.connection.execute(sql, *values)
        self.lost += 1
        if self.done:
            await self.connection.execute(sql)
        self.connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


@pytest.fixture(params=[True, False], ids=["committed", "not-committed"])
def lose(request: pytest.FixtureRequest, store: PostgresStore) -> Callable[[], Loses]:
    """From now on the answer to the next COMMIT is lost; the one after it arrives."""

    def begin() -> Loses:
        session = store._session
        assert session is not None
        idle = session.connections._idle
        losing = Loses(idle.pop(), request.param)
        idle.append(losing)
        return losing

    return begin


async def test_a_lease_whose_answer_was_lost_is_given_once(
    store: PostgresStore, rollout: RolloutOf, lose: Callable[[], Loses]
) -> None:
    await store.create_rollouts([rollout(name) for name in "abc"])
    lost = lose()
    assert [(lease.rollout.id, lease.attempt) for lease in await store.lease("run", "w", limit=2)] == [
        ("a", 1),
        ("b", 1),
    ]
    assert lost.lost == 1
    assert [(r.id, r.status, r.attempt) for r in (await store.list_rollouts("run")).items] == [
        ("a", Status.RUNNING, 1),
        ("b", Status.RUNNING, 1),
        ("c", Status.PENDING, 0),
    ]
    assert (await store.complete("a", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED


async def test_counts_are_those_of_the_try_that_counted(
    store: PostgresStore, rollout: RolloutOf, call: CallOf, lose: Callable[[], Loses]
) -> None:
    await store.create_rollouts([rollout("a")])
    lose()
    assert await store.create_rollouts([rollout(name) for name in "abc"]) == 2
    await store.lease("run", "w")
    await store.append([call(0)])
    lose()
    assert await store.append([call(0), call(1), call(2)]) == 2
    assert await store.transitions("a") == [call(0), call(1), call(2)]
    lose()
    assert await store.release("w") == 1
    assert [lease.attempt for lease in await store.lease("run", "w")] == [2]


async def test_a_roll_back_whose_answer_was_lost_goes_back_once(
    store: PostgresStore, lose: Callable[[], Loses]
) -> None:
    for text in "abc":
        version = (await put_resource(store, Resource("w", text))).version
        await set_alias(store, "w", "production", version)
    lose()
    assert (await roll_back_alias(store, "w", "production")).version == 2
    assert [move.version for move in await alias_history(store, "w", "production")] == [1, 2, 3, 2]


@pytest.mark.parametrize("move", ["roll back", "set"])
async def test_a_move_whose_answer_was_lost_leaves_alone_what_was_moved_since(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    """The answer is lost after the commit, and another process moves the alias before it is asked for again."""
    for text in "abc":
        await put_resource(store, Resource("w", text))
    for version in (1, 2):
        await set_alias(store, "w", "production", version)
    other = PostgresStore(store._settings)
    await other.open()
    waited = connections.Patience.wait

    async def wait(self: Any, error: BaseException) -> None:
        await set_alias(other, "w", "production", 3)
        await waited(self, error)

    monkeypatch.setattr(connections.Patience, "wait", wait)
    session = store._session
    assert session is not None
    session.connections._idle.append(Loses(session.connections._idle.pop(), True))
    moved = roll_back_alias(store, "w", "production") if move == "roll back" else set_alias(store, "w", "production", 1)
    assert (await moved).version == 1
    assert [kept.version for kept in await alias_history(store, "w", "production")] == [1, 2, 1, 3]
    await other.close()


@pytest.mark.parametrize("ends", ["committed", "rolled back"])
async def test_a_call_whose_first_try_is_still_on_its_way_is_waited_for(
    store: PostgresStore, rollout: RolloutOf, ends: str
) -> None:
    other = PostgresStore(store._settings)
    await other.open()
    await store.create_rollouts([rollout(name) for name in "ab"])
    token = Token("t", Scope.RUNNER, "d" * 64)
    assert await list_tokens(store) == []  # the table is made
    done, let_go, here = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    async def first(tx: Any) -> None:
        await tokens_sql.put(tx, token, "1")
        await operations.lease(tx, "run", "w", 1, 60.0, "1")
        here.call_soon_threadsafe(done.set)
        while not let_go.is_set():
            await asyncio.sleep(0.01)
        if ends != "committed":
            raise StoreError("it breaks off")

    trying = asyncio.ensure_future(other._write(first))
    await done.wait()
    again = [
        asyncio.ensure_future(put_token(store, token, once="1")),
        asyncio.ensure_future(store.lease("run", "w", once="1")),
    ]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in again)
    let_go.set()
    stored, (lease,) = await asyncio.gather(*again)
    assert (stored.id, lease.rollout.id, lease.attempt) == ("t", "a", 1)
    await asyncio.gather(trying, return_exceptions=True)
    assert [r.status for r in (await store.list_rollouts("run")).items] == [Status.RUNNING, Status.PENDING]
    await other.close()


async def test_a_value_whose_answer_was_lost_does_not_replace_a_newer_one(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost after the commit, and another process writes before it is asked for again."""
    other = PostgresStore(store._settings)
    await other.open()
    waited = connections.Patience.wait

    async def wait(self: Any, error: BaseException) -> None:
        await other.put_state("run", "k", "newer")
        await other.log_metrics("run", 0, {"loss": 1.0})
        await waited(self, error)

    monkeypatch.setattr(connections.Patience, "wait", wait)
    session = store._session
    assert session is not None
    for write in (lambda: store.put_state("run", "k", "older"), lambda: store.log_metrics("run", 0, {"loss": 2.0})):
        session.connections._idle.append(Loses(session.connections._idle.pop(), True))
        await write()
    assert await store.get_state("run", "k") == "newer"
    assert [point.values for point in await store.metrics("run")] == [{"loss": 1.0}]
    await other.close()


async def test_signs_of_life_leave_no_answers(store: PostgresStore) -> None:
    """There is one every second, and each is as good as the one before."""
    owner, member = Owner(store, "run"), Member(store, "run", 1.0)
    await owner.open((), 0)
    await member._take_seat()
    signer = TokenSigner(b"s" * 32)
    book = TraceBook(store, shared=True)
    signer.watchers.append(book.note_key)
    before = await store._read(lambda tx: tx.one("SELECT count(*) FROM answers"))
    for _ in range(2):
        await member._beat()
    signer.issue("a", 1, 60.0)
    await book.close()
    assert await store._read(lambda tx: tx.one("SELECT count(*) FROM answers")) == before == (1,), "the notice's"
    seat = from_json(Seat, await store.get_state("", seat_key("run", 0)))
    assert seat is not None
    assert seat.beat == 2
    await member.leave()


async def test_old_answers_go_when_new_ones_come(store: PostgresStore) -> None:
    for number in range(12):
        await store.put_state("run", "k", number)
    await store._write(lambda tx: tx.run("UPDATE answers SET until = 1"))
    for left in (5, 1, 1):  # eight go for each that comes
        await store.put_state("run", "k", left)
        assert (await store._read(lambda tx: tx.one("SELECT count(*) FROM answers WHERE until < 2")))[0] == max(
            left - 1, 0
        )


async def test_a_failed_notification_leaves_no_broken_connection_behind(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(postgres_connection, "channel", lambda settings: "x" * 8 + " nonsense")
        with pytest.raises(StoreError):
            await store.put_state("run", "k", 1)
    await store.put_state("run", "k", 2)
    assert await store.get_state("run", "k") == 2


async def test_a_token_whose_answer_was_lost_is_no_conflict(store: PostgresStore, lose: Callable[[], Loses]) -> None:
    token = Token("t", Scope.RUNNER, "d" * 64)
    lose()
    assert (await put_token(store, token)).digest == token.digest
    with pytest.raises(ConflictError):
        await put_token(store, token)


async def test_an_outcome_whose_answer_was_lost_ends_once(
    store: PostgresStore, rollout: RolloutOf, lose: Callable[[], Loses]
) -> None:
    await store.create_rollouts([rollout()])
    await store.lease("run", "w")
    lose()
    assert (await store.complete("a", 1, Outcome(reward=0.5))).reward == 0.5
    assert (await store.complete("a", 1, Outcome(reward=0.5))).status is Status.SUCCEEDED


# lost servers and clients ---------------------------------------------------------------------------------------


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed_under_load(own_server: PostgresServer) -> None:
    """Eight agents append, complete and take the next rollout while the server dies three times; nobody hears an error."""
    store = PostgresStore.from_url(own_server.url_of("crash", ssl="disable", pool=8, timeout=200))
    await store.open()
    names = [f"r{i:03}" for i in range(240)]
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in names])
    acknowledged: list[Transition] = []
    leased: list[tuple[str, int]] = []
    done: dict[str, float] = {}

    async def agent(worker: str) -> None:
        while held := await store.lease("run", worker, ttl=3600):
            lease = held[0]
            leased.append((lease.rollout.id, lease.attempt))
            for seq in range(3):
                prompt = token_ids(range(50 * (seq + 1)))
                call = Transition(lease.rollout.id, 1, seq, "c", prompt, token_ids([seq]), logprobs([-1.0]))
                assert await store.append([call]) == 1
                acknowledged.append(call)
            reward = float(len(done))
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=reward))
            done[lease.rollout.id] = reward

    async def murderer() -> None:
        for share in (0.2, 0.45, 0.7):
            while len(done) < share * len(names):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)

    await asyncio.gather(murderer(), *(agent(f"w{i}") for i in range(8)))
    assert sorted(leased) == [(name, 1) for name in names]  # no attempt twice, and none wasted
    rollouts = (await store.list_rollouts("run", status=Status.SUCCEEDED)).items
    assert {r.id: r.reward for r in rollouts} == done
    assert len(done) == len(names)
    stored = await store.transitions_of([(name, 1) for name in names])
    assert sorted((t.rollout, t.seq) for calls in stored for t in calls) == sorted(
        (t.rollout, t.seq) for t in acknowledged
    )
    assert {t.key: t for calls in stored for t in calls} == {t.key: t for t in acknowledged}
    await store.close()


HOLD = """
    import asyncio, sys
    from lightning_postgres.store import PostgresStore
    from lightning.types import Outcome

    async def main(url):
        store = PostgresStore.from_url(url)
        await store.open()

        async def hold(tx):
            await tx.locked("SELECT n FROM rollouts WHERE id = ?", ("a",))
            await tx.run("UPDATE rollouts SET reward = 9 WHERE id = ?", ("a",))
            print("held", flush=True)
            await asyncio.sleep(600)

        await store._write(hold)

    asyncio.run(main(sys.argv[1]))
"""


async def test_a_client_killed_inside_its_transaction_leaves_nothing_behind(
    store: PostgresStore, postgres_server: PostgresServer, rollout: RolloutOf, call: CallOf
) -> None:
    await store.create_rollouts([rollout()])
    await store.lease("run", "w")
    url = postgres_server.url_of(store._settings.schema, ssl="disable")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), url], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
        waiting = asyncio.ensure_future(store.append([call(0)]))
        assert await store.lease("run", "other") == []  # a lease waits for nobody
        await asyncio.sleep(0.1)
        assert not waiting.done()
        os.kill(holder.pid, signal.SIGKILL)
        assert await asyncio.wait_for(waiting, 30) == 1
    found = await store.get_rollout("a")
    assert found is not None
    assert (found.status, found.reward) == (Status.RUNNING, None)


async def test_a_server_that_stays_away_is_unavailable_and_one_that_returns_is_used(own_server: PostgresServer) -> None:
    store = PostgresStore.from_url(own_server.url_of("away", ssl="disable", timeout=0.4))
    await store.open()
    await store.put_state("run", "k", 1)
    own_server.kill_all()
    for ask in (lambda: store.put_state("run", "k", 2), lambda: store.get_state("run", "k")):
        with pytest.raises(UnavailableError, match=rf"127.0.0.1:{own_server.port}.*0.4 s.*\?timeout="):
            await ask()
    await asyncio.to_thread(own_server.start)
    assert await store.get_state("run", "k") == 1
    await store.put_state("run", "k", 3)
    own_server.kill()
    await asyncio.wait_for(store.close(), 20)


async def test_a_server_that_hangs_is_waited_for_no_longer_than_the_timeout(own_server: PostgresServer) -> None:
    """Also by those who wait for a connection that the others have."""
    store = PostgresStore.from_url(own_server.url_of("hangs", ssl="disable", timeout=1, pool=2))
    await store.open()
    await asyncio.gather(*(store.list_runs() for _ in range(4)))
    assert own_server.process is not None
    main = own_server.process.pid
    family = [main, *map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())]
    loop, took = asyncio.get_running_loop(), []

    async def ask() -> None:
        begun = loop.time()
        with pytest.raises(UnavailableError):
            await store.list_runs()
        took.append(loop.time() - begun)

    for process in family:
        os.kill(process, signal.SIGSTOP)
    try:
        await asyncio.gather(*(ask() for _ in range(12)))
    finally:
        for process in family:
            with contextlib.suppress(ProcessLookupError):  # one that had just ended is gone when the first goes on
                os.kill(process, signal.SIGCONT)
    assert max(took) < 3
    assert await store.list_runs() == []
    await store.close()


async def test_connections_on_which_nothing_is_answered_are_given_up_for_new_ones(
    store: PostgresStore, rollout: RolloutOf
) -> None:
    """As after a failover in which the old server said no good-bye. Also those who wait for a connection get one."""
    store = PostgresStore(replace(store._settings, pool=2, timeout=6))
    await store.open()
    await asyncio.gather(*(store.list_runs() for _ in range(2)))
    assert store._session is not None
    old = [connection.get_server_pid() for connection in store._session.connections._idle]
    for process in old:
        os.kill(process, signal.SIGSTOP)
    try:
        made = await asyncio.gather(
            *(store.create_rollouts([rollout(name)]) for name in "abc"), *(store.list_runs() for _ in range(3))
        )
    finally:
        for process in old:
            os.kill(process, signal.SIGCONT)
    assert len(old) == 2
    assert made[:3] == [1, 1, 1]
    assert sorted(found.id for found in (await store.list_rollouts("run")).items) == ["a", "b", "c"]
    await store.close()


def sleep(seconds: float) -> Callable[[Any], Any]:
    """An operation of one statement that takes so long."""
    return lambda tx: tx.one("SELECT 1 FROM pg_sleep(?)", (seconds,))


async def test_a_statement_may_take_all_of_the_timeout(store: PostgresStore) -> None:
    store = PostgresStore(replace(store._settings, timeout=1))
    await store.open()
    await store.list_runs()
    assert store._session is not None
    (connection,) = store._session.connections._idle
    assert await store._read(sleep(0.7)) == (1,)
    assert store._session.connections._idle == [connection], "it is the one that there was"
    await store.close()


async def test_a_statement_that_takes_longer_is_said_by_the_server_that_answers(
    store: PostgresStore,
) -> None:
    """Once on the connection that there was, and once more on a new one."""
    store = PostgresStore(replace(store._settings, timeout=0.4))
    await store.open()
    tries: list[object] = []

    def ask(transaction: Any) -> Any:
        tries.append(transaction)
        return sleep(30)(transaction)

    for run in (store._read, store._write):
        await store.list_runs()  # leaves a connection
        tries.clear()
        with pytest.raises(UnavailableError, match=r"a statement took longer than 0\.4 s \(\?timeout=\)"):
            await run(ask)
        assert len(tries) == 2
    assert await store.list_runs() != []
    await store.close()


# changes --------------------------------------------------------------------------------------------------------


async def test_another_process_is_heard_at_once(store: PostgresStore, rollout: RolloutOf) -> None:
    other = PostgresStore(store._settings)
    await other.open()
    async with store.watch("run") as watch, store.watch("") as whole:
        await other.create_rollouts([rollout()])
        assert await watch.wait(20)
        assert not await whole.wait(0.05)
        await other.put_state("", "k", 1)
        assert await whole.wait(20)
        assert not await watch.wait(0)
    await other.close()


async def test_a_lost_connection_counts_as_a_change(
    store: PostgresStore, rollout: RolloutOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_watching, "RETRY", 0.01)
    connection = await direct(store)
    async with store.watch("run") as watch:
        assert not await watch.wait(0)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        assert await watch.wait(20)
        await store.create_rollouts([rollout()])  # perhaps before it listens again
        assert await watch.wait(20)
    await connection.close()


async def test_a_listener_that_loses_its_connection_has_the_idle_ones_closed(store: PostgresStore) -> None:
    """It asks every few seconds; they would be found out by whoever uses them next, after all of its patience."""
    connection = await direct(store)
    async with store.watch("run") as watch:
        assert not await watch.wait(0)
        assert store._session is not None
        idle = store._session.connections._idle
        before = list(idle)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        assert await watch.wait(20)
        assert not idle
        assert [old.is_closed() for old in before] == [True]
    await connection.close()


async def test_a_listener_that_loses_its_connection_as_it_closes_ends(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        def add_termination_listener(self, told: Callable[[object], None]) -> None:
            self.told = told

        async def add_listener(self, *_: object) -> None:
            pass

        async def execute(self, *_: object, **__: object) -> None:
            pass

        def terminate(self) -> None:
            pass

    connection = Connection()

    async def connect(_: object, **__: object) -> Connection:
        return connection

    monkeypatch.setattr(postgres_watching, "connect", connect)
    listener = postgres_watching.Listener(store._settings, Bell(), lambda: None)
    await listener.begin()
    await asyncio.sleep(0.01)
    connection.told(None)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(listener.close())
    done, _ = await asyncio.wait([closing], timeout=120)
    assert done


async def test_a_watch_ends_with_its_store(postgres_url: Callable[[], str]) -> None:
    store = PostgresStore.from_url(postgres_url())
    with pytest.raises(StoreError, match="not open"):
        async with store.watch("run"):
            pass
    await store.open()
    async with store.watch("run") as watch:
        waiting = asyncio.ensure_future(watch.wait(30))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreError, match="not open"):
            await waiting


# many at once ---------------------------------------------------------------------------------------------------


async def test_a_page_after_a_cursor_misses_nothing_that_was_created_meanwhile(store: PostgresStore) -> None:
    """Rows get their numbers before they are committed: a reader must not pass a number that is still to appear."""
    other = PostgresStore(store._settings)
    await other.open()
    seen: list[str] = []

    async def create(store: PostgresStore, who: str) -> None:
        for i in range(30):
            await store.create_rollouts([Rollout(f"{who}-{i}-{j}", "run", Task("q"), "g") for j in range(3)])

    async def read() -> None:
        cursor = ""
        while len(seen) < 360:
            page = await store.list_rollouts("run", cursor=cursor, limit=7)
            seen.extend(r.id for r in page.items)
            if page.cursor:
                cursor = page.cursor
            elif page.items:  # the last page so far: go on after it, as its cursor would
                connection = await store._read(lambda tx: tx.one("SELECT n FROM rollouts WHERE id = ?", (seen[-1],)))
                assert connection is not None
                cursor = str(connection[0])

    await asyncio.wait_for(
        asyncio.gather(read(), *(create(s, f"{k}{i}") for i, s in enumerate((store, other)) for k in "xy")), 60
    )
    assert len(set(seen)) == 360
    await other.close()


async def test_operations_that_lock_one_another_are_sorted_out(store: PostgresStore, rollout: RolloutOf) -> None:
    """Two transactions that take the same rows in opposite orders: one is told of the deadlock and runs again."""
    await store.create_rollouts([rollout("a"), rollout("b")])
    met = asyncio.Barrier(2)
    tries: list[str] = []

    def take(first: str, second: str) -> Any:
        async def operation(tx: Any) -> str:
            tries.append(first)
            await tx.locked("SELECT n FROM rollouts WHERE id = ?", (first,))
            if len(tries) <= 2:
                await met.wait()
            await tx.locked("SELECT n FROM rollouts WHERE id = ?", (second,))
            return first

        return operation

    assert await asyncio.gather(store._write(take("a", "b")), store._write(take("b", "a"))) == ["a", "b"]
    assert len(tries) > 2


async def test_a_failed_operation_leaves_no_parent_behind(
    store: PostgresStore, rollout: RolloutOf, call: CallOf
) -> None:
    await store.create_rollouts([rollout()])
    await store.lease("run", "w", ttl=3600)

    async def fail(tx: Any) -> None:
        await operations.append(tx, [operations.prepare(call(0, range(100)))])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await store._write(fail)
    later = call(1, range(200))
    await store.append([later])
    assert await store.transitions("a") == [later]


# what it says ---------------------------------------------------------------------------------------------------


async def refused(url: str) -> StoreError:
    """The error that opening gives; the store object must be usable again afterwards."""
    store = PostgresStore.from_url(url)
    with pytest.raises(StoreError) as caught:
        await store.open()
    with pytest.raises(StoreError, match="not open"):
        await store.list_runs()
    await store.close()
    assert "secret" not in str(caught.value)
    return caught.value


async def test_schemas_that_are_not_ours_are_refused_untouched(postgres_server: PostgresServer) -> None:
    urls = {name: postgres_server.url_of(f"of_{name}", ssl="disable") for name in ("newer", "other", "damaged", "zero")}
    for name in ("newer", "damaged", "zero"):
        store = PostgresStore.from_url(urls[name])
        await store.open()
        await store.close()
    postgres_server.sql("UPDATE of_newer.schema_version SET version = 99")
    postgres_server.sql("DELETE FROM of_damaged.schema_version")
    postgres_server.sql("UPDATE of_zero.schema_version SET version = 0")
    postgres_server.sql("CREATE SCHEMA of_other; CREATE TABLE of_other.bookmarks (url TEXT)")
    newer, other, damaged, zero = [await refused(urls[name]) for name in ("newer", "other", "damaged", "zero")]
    assert isinstance(newer, SchemaError)
    assert (
        f"has schema 99, but this version of lightning works with schema {SCHEMA} only: use the version that wrote"
        in str(newer)
    )
    assert isinstance(other, SchemaError)
    assert "bookmarks" in str(other)
    assert isinstance(damaged, SchemaError)
    assert isinstance(zero, SchemaError)
    for name in ("damaged", "zero"):
        with pytest.raises(SchemaError, match="has a damaged schema version"):
            await keeper_of(urls[name]).status()
    assert postgres_server.sql("SELECT count(*) FROM pg_tables WHERE schemaname = 'of_other'") == "1"
    await postgres_server.clear(["of_newer", "of_other", "of_damaged", "of_zero"])
    postgres_server.empty.clear()


async def test_servers_that_refuse_are_named_with_the_cure(postgres_server: PostgresServer) -> None:
    place = f"127.0.0.1:{postgres_server.port}"
    assert "createdb" in str(await refused(f"postgresql://{USER}:secret@{place}/nothing?ssl=disable"))
    assert "user or password" in str(await refused(f"postgresql://nobody:secret@{place}/postgres?ssl=disable"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    away = await refused(f"postgresql://me:secret@127.0.0.1:{closed}/db?timeout=0.2")
    assert isinstance(away, UnavailableError)


async def test_a_user_without_rights_is_told_which(postgres_server: PostgresServer) -> None:
    postgres_server.sql("CREATE ROLE poor LOGIN")
    error = await refused(f"postgresql://poor@127.0.0.1:{postgres_server.port}/postgres?schema=poor&ssl=disable")
    assert "lacks the right" in str(error)
    postgres_server.sql("DROP ROLE poor")


async def test_values_that_it_cannot_hold_are_refused(store: PostgresStore, rollout: RolloutOf) -> None:
    for name in ("nul \0", "surrogate \ud800", "x" * 9000 + os.urandom(9000).hex()):
        with pytest.raises(DataError):
            await store.create_rollouts([rollout(name)])
    with pytest.raises(DataError):
        await store.create_rollouts([rollout("big", step=2**63)])
    assert (await store.list_rollouts("run")).items == ()


async def test_processes_that_open_a_new_schema_together_make_its_tables_once(postgres_server: PostgresServer) -> None:
    stores = [PostgresStore.from_url(postgres_server.url_of("together", ssl="disable")) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    assert postgres_server.sql("SELECT version FROM together.schema_version") == str(SCHEMA)
    await asyncio.gather(*(store.close() for store in stores))
    await postgres_server.clear(["together"])


async def test_tables_that_another_process_makes_are_waited_for(postgres_server: PostgresServer) -> None:
    store = PostgresStore.from_url(postgres_server.url_of("slow", ssl="disable", timeout=0.5))
    other = await direct(store)
    await other.execute("SELECT pg_advisory_lock($1)", lock_key(store._settings, "tables"))
    opening = asyncio.ensure_future(store.open())
    await asyncio.sleep(1.2)
    assert not opening.done()
    await other.close()
    await opening
    assert await store.list_runs() == []
    await store.close()
    await postgres_server.clear(["slow"])


async def test_a_fork_is_told_to_open_its_own(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -7)
        with pytest.raises(StoreError, match="open a store of its own in each process"):
            await store.list_runs()


async def test_a_fork_that_opens_the_store_has_one_of_its_own(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the process that it was forked from is not there: nobody would ever answer."""
    theirs = store._session
    assert theirs is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -7)
        patch.setattr(theirs.thread, "submit", lambda _: asyncio.get_running_loop().create_future())
        await asyncio.wait_for(store.open(), 30)
        assert [run.id for run in await store.list_runs()] == ["run"]
        await store.close()
    store._session = theirs
    assert [run.id for run in await store.list_runs()] == ["run"]


async def test_the_tables_are_those_of_sqlite(store: PostgresStore, tmp_path: Path) -> None:
    sqlite = SqliteStore(tmp_path / "store.db")
    await sqlite.open()
    await sqlite.close()
    with sqlite3.connect(tmp_path / "store.db") as file:
        names = [
            row[0]
            for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'revisions'")
        ]
        expected = {name: {row[1] for row in file.execute(f"PRAGMA table_info({name})")} for name in names}
    file.close()
    connection = await direct(store)
    found: dict[str, set[str]] = {}
    for table, column in await connection.fetch(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = $1", store._settings.schema
    ):
        found.setdefault(table, set()).add(column)
    external = await connection.fetchval(
        "SELECT attstorage FROM pg_attribute WHERE attrelid = 'transitions'::regclass AND attname = 'tokens'"
    )
    await connection.close()
    assert found == expected
    assert external == b"e"
