"""What is particular to SQLite: group commit, readers, how little space prompts take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import StoreError, UnavailableError
from lightning.store import codec, rows
from lightning.store.codec import Fingerprint, KnownTransition, ParentCache, Prompt, choose
from lightning.store.operation import Operations
from lightning.store.relational import operations as rollout_ops
from lightning.store.relational.transaction import Operation, Transaction
from lightning.store.sqlite import SqliteStore
from lightning.store.sqlite import connection as sqlite_connection
from lightning.types import Fault, Outcome, Rollout, Run, Transition, token_ids

from tests.servers.stores import BranchedIn

CallOf = Callable[..., Transition]
RolloutOf = Callable[..., Rollout]


class Held:
    """Keeps the writer busy, so that what is submitted meanwhile lands in one group."""

    def __init__(self, store: SqliteStore) -> None:
        writer = store._writer
        assert writer is not None
        self.writer = writer
        self.statements: list[str] = []

    def __enter__(self) -> Self:
        self.go, started = threading.Event(), threading.Event()

        async def wait(_: Transaction) -> None:
            started.set()
            assert self.go.wait(30)

        self.first = self.writer.submit(wait)
        assert started.wait(30)
        self.writer._connection.set_trace_callback(self.statements.append)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()

    def submit(self, operation: Operation[object]) -> asyncio.Future[object]:
        return self.writer.submit(operation)

    @property
    def commits(self) -> int:
        return self.statements.count("COMMIT")


def state(name: str) -> Operation[object]:
    return lambda tx: tx.run("INSERT INTO state (run, name, value) VALUES ('run', ?, '1')", (name,))


async def fail(tx: Transaction) -> object:
    await state("never")(tx)
    raise KeyError("mine")


# group commit ---------------------------------------------------------------------------------------------------


async def test_operations_that_wait_together_are_committed_together(sqlite: SqliteStore) -> None:
    with Held(sqlite) as held:
        futures = [held.submit(state(f"k{i}")) for i in range(100)]
    assert await asyncio.wait_for(asyncio.gather(*futures), 30) == [1] * 100
    assert held.commits == 2  # the one that was waited for, then all of these


async def test_one_failing_operation_fails_only_its_caller(sqlite: SqliteStore) -> None:
    with Held(sqlite) as held:
        before, bad, again, after = (held.submit(op) for op in (state("a"), fail, state("a"), state("b")))
    assert await asyncio.wait_for(before, 30) == 1
    with pytest.raises(KeyError, match="mine"):
        await bad
    with pytest.raises(StoreError):
        await again
    assert await asyncio.wait_for(after, 30) == 1
    assert held.commits == 2  # the one that was waited for, then all of these
    assert [await sqlite.get_state("run", name) for name in ("a", "b", "never")] == [1, 1, None]


async def test_what_is_done_first_is_done_outside_the_transaction(sqlite: SqliteStore) -> None:
    writer = sqlite._writer
    assert writer is not None
    open_then: list[bool] = []

    def refuse() -> None:
        raise KeyError("mine")

    with Held(sqlite):
        made = writer.submit(state("a"), lambda: open_then.append(writer._connection.in_transaction))
        refused = writer.submit(state("b"), refuse)
        after = writer.submit(state("c"))
    assert await asyncio.wait_for(asyncio.gather(made, after), 30) == [1, 1]
    with pytest.raises(KeyError, match="mine"):
        await refused
    assert open_then == [False]
    assert [await sqlite.get_state("run", name) for name in "abc"] == [1, None, 1]


async def test_a_value_of_the_state_becomes_json_outside_the_writing_thread(
    sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, threads = rows.dump, list[str]()

    def watched(value: object, *what: str) -> str:
        threads.append(threading.current_thread().name)
        return dump(value, *what)

    monkeypatch.setattr(rows, "dump", watched)
    await sqlite.put_state("run", "k", {"a": 1})
    assert await sqlite.keep_state("run", "k", {"a": 2}) == {"a": 1}
    assert threads == [threading.main_thread().name] * 2


async def test_a_named_call_is_one_call_in_whatever_order_its_arguments_come(sqlite: SqliteStore) -> None:
    named: dict[str, object] = {"run": "run", "step": 1, "values": {"loss": 2.0}, "once": "1"}
    log_metrics: Any = vars(Operations)["log_metrics"]
    await sqlite.call(log_metrics, named)
    await sqlite.log_metrics("run", 1, {"loss": 1.0})
    await sqlite.call(log_metrics, dict(reversed(named.items())))
    assert [point.values for point in await sqlite.metrics("run")] == [{"loss": 1.0}]


async def test_a_lost_transaction_is_done_again_one_by_one(sqlite: SqliteStore) -> None:
    async def lose(tx: Transaction) -> object:
        await tx.run("ROLLBACK")  # as SQLite itself does when it runs out of space or memory
        raise sqlite3.OperationalError("lost")

    with Held(sqlite) as held:
        before, bad, after = (held.submit(op) for op in (state("a"), lose, state("b")))
    assert await asyncio.wait_for(before, 30) == 1
    with pytest.raises(StoreError):
        await bad
    assert await asyncio.wait_for(after, 30) == 1
    assert [await sqlite.get_state("run", name) for name in ("a", "b")] == [1, 1]


async def test_a_connection_that_cannot_roll_back_is_replaced(sqlite: SqliteStore) -> None:
    class Broken:
        in_transaction = True

        def __init__(self, inner: sqlite3.Connection) -> None:
            self.inner = inner

        def execute(self, sql: str) -> object:
            raise sqlite3.OperationalError("disk I/O error")

        def close(self) -> None:
            self.inner.close()

    writer = sqlite._writer
    assert writer is not None
    writer._connection = Broken(writer._connection)  # type: ignore[assignment]
    with pytest.raises(StoreError, match="disk I/O error"):
        await sqlite.put_state("run", "k", 1)
    await sqlite.put_state("run", "k", 2)
    assert await sqlite.get_state("run", "k") == 2


async def test_a_caller_that_left_before_its_turn_is_skipped(sqlite: SqliteStore) -> None:
    with Held(sqlite) as held:
        gone, stays = held.submit(state("gone")), held.submit(state("stays"))
        assert gone.cancel()
    assert await asyncio.wait_for(stays, 30) == 1
    assert await sqlite.get_state("run", "gone") is None


def test_callers_on_several_loops_are_told_each_on_their_own(tmp_path: Path) -> None:
    store, told = SqliteStore(tmp_path / "store.db"), []
    asyncio.run(store.open())

    async def put(number: int) -> None:
        await asyncio.gather(*(store.put_state("run", f"{number}/{each}", number) for each in range(20)))
        told.append((number, asyncio.get_running_loop()))

    threads = [threading.Thread(target=lambda number=number: asyncio.run(put(number))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(number for number, _ in told) == [0, 1, 2, 3]
    assert len({loop for _, loop in told}) == 4
    assert asyncio.run(store.get_state("run", "3/19")) == 3
    asyncio.run(store.close())


async def test_a_failed_append_leaves_no_parent_behind(sqlite: SqliteStore, rollout: RolloutOf, call: CallOf) -> None:
    """A rolled-back call must not become the parent of one that is committed."""
    await sqlite.create_rollouts([rollout()])
    await sqlite.lease("run", "w", ttl=3600)

    async def append_and_fail(tx: Transaction) -> None:
        await rollout_ops.append(tx, [rollout_ops.prepare(call(0, range(100)))])
        await fail(tx)

    with pytest.raises(Exception, match="mine"):
        await sqlite._write(append_and_fail)
    later = call(1, range(200))
    await sqlite.append([later])
    assert await sqlite.transitions("a") == [later]


async def test_readers_do_not_wait_for_the_writer(sqlite: SqliteStore) -> None:
    with Held(sqlite):
        assert await asyncio.wait_for(sqlite.get_state("run", "k"), 30) is None


async def test_a_fork_is_told_to_open_its_own(sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -7)
        with pytest.raises(StoreError, match="open a store of its own in each process"):
            await sqlite.list_runs()


async def test_a_fork_that_opens_the_store_has_one_of_its_own(
    sqlite: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, readers, bell = sqlite._writer, sqlite._readers, sqlite._bell
    own = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -7)
        patch.setattr(writer, "submit", None)
        await sqlite.open()
        await sqlite.put_state("run", "k", 7)
        await sqlite.close()
    sqlite._writer, sqlite._readers, sqlite._bell, sqlite._process = writer, readers, bell, own
    assert await sqlite.get_state("run", "k") == 7
    await sqlite.put_state("run", "k", 8)


async def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new.db", tmp_path / "old.db"
    old.touch()
    old.chmod(0o640)
    for path in (new, old):
        store = SqliteStore(path)
        await store.open()
        assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob(f"{path.name}*")} == {
            0o600 if path is new else 0o640
        }
        await store.close()


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
async def test_sync_is_what_the_url_says(tmp_path: Path, sync: str, level: int) -> None:
    store = SqliteStore.from_url(f"sqlite:///{tmp_path}/s.db?sync={sync}")
    await store.open()
    assert await store._write(lambda tx: tx.one("PRAGMA synchronous")) == (level,)
    assert await store._write(lambda tx: tx.one("PRAGMA journal_mode")) == ("wal",)
    await store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]  # the log is folded in


async def test_how_every_attempt_ended_is_on_record(sqlite: SqliteStore, rollout: RolloutOf) -> None:
    await sqlite.create_rollouts([rollout(max_attempts=3)])
    await sqlite.lease("run", "w1", ttl=0)
    await sqlite.lease("run", "w2")
    await sqlite.release("w2")
    await sqlite.lease("run", "w3")
    await sqlite.complete("a", 3, Outcome(fault=Fault.INFRASTRUCTURE))
    await sqlite.lease("run", "w4", ttl=0)
    assert await sqlite.lease("run", "w5") == []
    found = await sqlite._read(lambda tx: tx.all("SELECT attempt, worker, ending, ended_at >= leased_at FROM attempts"))
    assert found == [
        (1, "w1", "expired", 1),
        (2, "w2", "released", 1),
        (3, "w3", "infrastructure", 1),
        (4, "w4", "expired", 1),
    ]


# parents --------------------------------------------------------------------------------------------------------


async def stored_bytes(store: SqliteStore) -> list[int]:
    found = await store._write(lambda tx: tx.all("SELECT length(tokens) FROM transitions ORDER BY n"))
    return [row[0] for row in found]


async def test_shared_prefixes_are_stored_once(sqlite: SqliteStore, rollout: RolloutOf, call: CallOf) -> None:
    """Turns of one agent, interleaved sub-agents, parallel choices, siblings of a group, a retried attempt."""
    await sqlite.create_rollouts([rollout("a"), rollout("b"), rollout("far", group="other")])
    await sqlite.lease("run", "w", limit=3, ttl=3600)
    rng = random.Random(0)
    first, second = ([rng.randrange(150_000) for _ in range(1000)] for _ in range(2))
    await sqlite.append(
        [
            call(0, first),
            call(1, second),
            call(2, [*first, 4, 5, 9]),
            call(3, [*second, 4, 5, 9]),
            call(4, second),
            call(0, first, rollout="b"),
            call(1, second, rollout="b"),
            call(0, first, rollout="far"),
        ]
    )
    sizes = await stored_bytes(sqlite)
    assert [size > 1000 for size in sizes] == [True, True, False, False, False, False, False, True]
    assert max(size for size in sizes if size <= 1000) < 60


async def test_parents_are_found_after_a_restart(tmp_path: Path, rollout: RolloutOf, call: CallOf) -> None:
    path = tmp_path / "s.db"
    first = SqliteStore(path)
    await first.open()
    await first.put_run(Run("run", "run"))
    await first.create_rollouts([rollout("a"), rollout("b")])
    await first.lease("run", "w", limit=2, ttl=3600)
    await first.append([call(0, range(0, 50_000, 50))])
    await first.close()
    second = SqliteStore(path)
    await second.open()
    calls = [call(1, [*range(0, 50_000, 50), 4, 5]), call(2, range(0, 50_000, 50))]
    await second.append([*calls, call(0, range(0, 50_000, 50), rollout="b")])
    assert max((await stored_bytes(second))[1:]) < 60
    assert (await second.transitions("a"))[1:] == calls
    await second.close()


async def test_a_branch_of_its_trunks_group_stores_no_token_of_the_prefix(
    sqlite: SqliteStore, branched: BranchedIn
) -> None:
    turns, live = await branched(sqlite)
    sizes = await stored_bytes(sqlite)
    assert [size > 1000 for size in sizes] == [True, True, True, True, *[False] * 4, True, True]
    assert max(sizes[4:8]) < 60
    again = SqliteStore(sqlite._settings.path)  # another process, which remembers nothing
    await again.open()
    live["b2"] = [replace(each, rollout="b2") for each in live["b0"]]
    await again.append(live["b2"])
    assert max((await stored_bytes(again))[-2:]) < 60
    assert await again.transitions_of([("a", 1), *((name, 1) for name in live)]) == [turns, *live.values()]
    await again.close()


async def test_the_branched_call_is_found_whenever_it_was_stored(
    tmp_path: Path, rollout: RolloutOf, call: CallOf
) -> None:
    """Among many agents' calls, of which it came first, and behind newer roots of its group."""
    path = tmp_path / "s.db"
    first = SqliteStore(path)
    await first.open()
    await first.put_run(Run("run", "run"))
    await first.create_rollouts([rollout("a"), rollout("other"), rollout("b", parent=("a", 1, 11))])
    await first.lease("run", "w", limit=3, ttl=3600)
    turns = [call(seq, range(1000 * seq, 1000 * seq + 500)) for seq in (11, *range(11))]
    others = [call(seq, range(10**6 + 1000 * seq, 10**6 + 1000 * seq + 500), rollout="other") for seq in range(33)]
    await first.append([*turns, *others])
    await first.close()
    second = SqliteStore(path)
    await second.open()
    live = call(11, turns[0].prompt_ids, [6], rollout="b")
    await second.append([live])
    assert (await stored_bytes(second))[-1] < 60
    assert await second.transitions("b") == [live]
    await second.close()


def packed(ids: Iterable[int]) -> bytes:
    return codec.pack(token_ids(list(ids)))


def known(n: int, ids: Iterable[int], prompt: int = 0) -> KnownTransition[int]:
    return KnownTransition(n, b"head", Fingerprint.of(packed(ids), 4 * prompt))


def chosen(prompt: Sequence[int], *candidates: KnownTransition[int]) -> tuple[KnownTransition[int] | None, int]:
    return choose(asking(prompt), candidates)


def asking(ids: Iterable[int], answer: Iterable[int] = ()) -> Prompt:
    prompt = packed(ids)
    return Prompt(prompt, Fingerprint.of(prompt + packed(answer), len(prompt)))


def test_the_longest_prefix_is_chosen_if_it_is_worth_it() -> None:
    prompt = range(100)
    short, long, other = known(1, range(60)), known(2, [*range(80), 7, 7]), known(3, [9] * 100)
    assert chosen(prompt, short, long, other) == (long, 80)
    assert chosen(prompt, known(4, range(40)), other) == (None, 0)
    assert chosen([], short) == (None, 0)
    assert chosen(prompt) == (None, 0)


@given(
    prompt=st.integers(1, 6000),
    shared=st.integers(0, 6000),
    asked=st.integers(0, 600),
    answered=st.integers(0, 600),
    whole=st.booleans(),
)
def test_no_more_is_taken_for_shared_than_is(prompt: int, shared: int, asked: int, answered: int, whole: bool) -> None:
    """Exactly as much of a short call, and where a prompt goes on from a long one or leaves it where its prompt ended; else to
    the block before."""
    new = list(range(prompt))
    common = new[:shared]
    old = known(1, [*common, *[-1] * answered] if whole else [*common, *[-1] * asked], len(common) if whole else 0)
    found = old.tokens.shared(asking(new, [5, 5]))
    assert found <= len(common)
    assert found > len(common) - 256
    if whole or not asked or old.tokens.length <= 4 * 4096:
        assert found == len(common)


def loading(*found: KnownTransition[int]) -> Callable[[], Awaitable[list[KnownTransition[int]]]]:
    async def load() -> list[KnownTransition[int]]:
        return list(found)

    return load


async def test_the_cache_keeps_leaves_and_forgets_what_was_rolled_back() -> None:
    cache = ParentCache[int](limit=1000)
    cache.add("new", known(1, [1]))  # nobody asked for it: it will be loaded when somebody does
    assert await cache.get("new", loading(known(2, [1, 2]))) == [known(2, [1, 2])]
    cache.add("new", known(3, [1, 2, 3]), known(2, [1, 2]))
    cache.add("new", known(4, [1, 9]))
    assert [k.key for k in await cache.get("new", loading())] == [3, 4]
    cache.keep()
    cache.add("new", known(5, [1, 9, 9]))
    cache.forget()
    assert [k.key for k in await cache.get("new", loading(known(6, [])))] == [6]


async def test_the_cache_keeps_the_newest_candidates_of_a_key() -> None:
    cache = ParentCache[int]()
    assert await cache.get("key", loading()) == []
    for number in range(100):
        cache.add("key", known(number, [number]))
    assert [k.key for k in await cache.get("key", loading())] == list(range(68, 100))
    size = cache._bytes
    cache.drop("key")
    assert cache._bytes == 0
    assert size == 32 * known(1, [1]).tokens.size


async def test_the_cache_drops_what_was_not_used_for_longest() -> None:
    cache = ParentCache[int](limit=1000)
    for key in "abc":
        await cache.get(key, loading(known(1, range(10))))
    await cache.get("a", loading())
    cache.keep()
    assert [k.key for k in await cache.get("a", loading())] == [1]
    assert await cache.get("b", loading()) == []
    cache.forget()
    assert cache._bytes <= 1000


# other processes ------------------------------------------------------------------------------------------------


async def test_writes_behind_a_lock_fail_together_at_their_own_deadlines(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db", busy_timeout=0.4)
    await store.open()
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    loop = asyncio.get_running_loop()

    async def write(number: int) -> float:
        began = loop.time()
        with pytest.raises(UnavailableError, match=r"kept it locked for 0.4 s"):
            await store.put_state("run", str(number), number)
        return loop.time() - began

    early = [asyncio.create_task(write(number)) for number in range(10)]
    await asyncio.sleep(0.2)
    late = [asyncio.create_task(write(number)) for number in range(10, 20)]
    took = await asyncio.gather(*early, *late)
    assert min(took) > 0.35
    assert max(took) < 1.5, "the last of 20 would take 8 s if each waited for the one before it"
    other.execute("ROLLBACK")
    other.close()
    await store.put_state("run", "after", 1)
    await store.close()


HOT = """
    import asyncio, sys
    from lightning.store.sqlite import SqliteStore

    async def main(path):
        store = SqliteStore(path)
        await store.open()

        async def write(tx):
            await tx.run("INSERT INTO state (run, name, value) VALUES ('hot', hex(randomblob(16)), '1')")
            await tx.one("WITH RECURSIVE c (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 3000) SELECT max(x) FROM c")

        async def caller():
            while True:
                await store._write(write)

        print("writing", flush=True)
        await asyncio.gather(*(caller() for _ in range(64)))

    asyncio.run(main(sys.argv[1]))
"""


async def test_a_process_that_writes_all_the_time_does_not_starve_another(sqlite: SqliteStore) -> None:
    """Beside SQLite's own way of waiting, write by write: whatever slows the machine slows both."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOT), sqlite._settings.path], stdout=subprocess.PIPE, text=True
    )
    plain = sqlite3.connect(sqlite._settings.path, isolation_level=None, timeout=2)
    loop = asyncio.get_running_loop()
    ours, sqlites = [], []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        await asyncio.sleep(0.3)
        for number in range(60):
            if number >= 4 and sum(sqlites) > 1.0:
                break  # it was starved, so that there is something to compare with
            await asyncio.sleep(0.05)
            began = loop.time()
            await sqlite.put_state("run", "slow", number)
            ours.append(loop.time() - began)
            await asyncio.sleep(0.05)  # the hot process, which was kept waiting, writes again
            began = loop.time()
            with contextlib.suppress(sqlite3.OperationalError):  # it has not come to write in 2 s
                plain.execute("INSERT INTO state (run, name, value) VALUES ('plain', ?, '1')", (str(number),))
            sqlites.append(loop.time() - began)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        plain.close()
    assert sum(ours) < sum(sqlites) / 2, (ours, sqlites)


@pytest.mark.parametrize("change", ["moved", "removed", "replaced"])
async def test_nothing_is_acknowledged_into_a_file_that_is_not_at_its_place(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "run"
    store = SqliteStore(folder / "lightning.db")
    await store.open()
    await store.put_run(Run("before", "here"))
    if change == "removed":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
    if change == "replaced":
        other = SqliteStore(folder / "lightning.db")
        await other.open()
        await other.close()
    for attempt in range(2):
        with pytest.raises(StoreError, match=r"lightning\.db was moved, removed or replaced while it was open"):
            await store.put_run(Run(f"lost{attempt}", "nowhere"))
    # A reader that was not there before would have made an empty file, and said that it has no tables.
    read = await asyncio.gather(*(store.get_run("before") for _ in range(9)), return_exceptions=True)
    assert all("was moved" in str(found) or isinstance(found, Run) for found in read), read
    assert any("was moved" in str(found) for found in read)
    assert folder.exists() == (change == "replaced")
    await store.close()
    if change == "moved":
        kept = SqliteStore(tmp_path / "elsewhere" / "lightning.db")
        await kept.open()
        assert await kept.get_run("before") is not None
        assert await kept.get_run("lost0") is None
        await kept.close()


async def test_a_store_stays_where_it_is_when_the_process_goes_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore.from_url("sqlite:///lightning.db")
    await store.open()
    monkeypatch.chdir(tmp_path / "there")
    await store.put_run(Run("one", "here"))
    assert await store.get_run("one") is not None
    await store.close()
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ext4", False),
        ("nfs4", True),
        ("cifs", True),
        ("9p", True),
        ("fuse.sshfs", True),
        ("fuseblk", False),
        ("fuse.fuse-overlayfs", False),
        ("fuse.gocryptfs", False),
        ("virtiofs", True),
    ],
)
async def test_a_file_that_other_machines_may_have_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, told: bool
) -> None:
    """SQLite itself says nothing: on NFS the log of one machine works, and that of two destroys the file."""
    folder = tmp_path / "our runs"
    folder.mkdir()
    point, mounts = str(folder.resolve()).replace(" ", "\\040"), tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"40 27 0:50 / {point} rw,relatime - nfs hidden:/ rw\n"
        f"41 27 0:51 / {point} rw,relatime shared:2 master:3 - {kind} server:/runs rw,vers=4.2\n"
        f"42 27 0:52 / {point}/other rw - nfs server:/other rw\n"
        "\n43 27 a line of another kernel\n"
    )
    monkeypatch.setattr(sqlite_connection, "MOUNTS", mounts)
    for path in (folder / "run" / "lightning.db", tmp_path / "local.db"):
        store = SqliteStore(path)
        await store.open()
        await store.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ([said[0]] if told else [])
    assert not told or (
        f"run/lightning.db is on a file system of the type {kind}" in said[0] and "PostgreSQL" in said[0]
    )
    monkeypatch.setattr(sqlite_connection, "MOUNTS", tmp_path / "nowhere")
    assert sqlite_connection.shared_file_system(str(folder)) == ""
