"""What is particular to Redis: its URLs, which servers are good enough, batches, parents, what lies under the prefix."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from lightning.errors import ConfigError, MissingExtraError, SchemaError, StoreError, UnavailableError
from lightning.installation import install_command
from lightning.store.protocol import Attempt
from lightning.types import Caller, Fault, Outcome, Rollout, Run, Scope, Span, StepRecord, Transition
from lightning_db.keeper import keeper_of
from lightning_otel.traces.store import append_spans, spans
from lightning_redis import keys, plugin
from lightning_redis.settings import Settings, from_url
from lightning_redis.store import RedisStore
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, roll_back_alias, set_alias
from lightning_server.tokens import Token, put_token, revoke_token

from tests.servers.redis import RedisServer, free_port
from tests.servers.redis_proxy import LossyProxy
from tests.servers.stores import BranchedIn

RolloutOf = Callable[..., Rollout]
CallOf = Callable[..., Transition]


# URLs -----------------------------------------------------------------------------------------------------------


def test_urls_are_taken_apart() -> None:
    assert from_url("redis://db.example") == Settings("db.example")
    assert from_url("rediss://me:p%40s%2Fs@[::1]:7000/3?prefix=a.b&durability=power&timeout=5&ca=/ca.pem") == Settings(
        "::1", 7000, 3, "me", "p@s/s", True, "a.b", "power", 5.0, "/ca.pem"
    )
    assert from_url("redis://:secret@h").password == "secret"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:hush@/0", "names no host"),
        ("redis://:hush@host:x/0", "no port"),
        ("redis://:hush@host:0", "no port"),
        ("redis://:hush@host/name", "names no database"),
        ("redis://:hush@host?prefx=a", "did you mean 'prefix'"),
        ("redis://:hush@host?prefix=a*b", "letters, digits"),
        ("redis://:hush@host?durability=yes", "process, power, everysec, none"),
        ("redis://:hush@host?timeout=soon", "number of seconds"),
        ("redis://:hush@host?timeout=-1", "between 0 and 600"),
        ("redis://:hush@host?timeout=1&timeout=2", "twice"),
        ("redis://:hush@host?timeout", "malformed"),
        ("redis://:hush@host?ca=/x", "rediss://"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused_without_their_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        RedisStore.from_url(url)
    assert "hush" not in str(caught.value)


def test_a_password_may_stay_out_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISCLI_AUTH", "hush")
    assert (from_url("redis://me@h").user, from_url("redis://me@h").password) == ("me", "hush")
    assert from_url("redis://:other@h").password == "other"


def test_nobody_sees_a_password() -> None:
    store = RedisStore.from_url("redis://me:hush@host:7000/1?prefix=x")
    assert repr(store) == "RedisStore('redis://host:7000/1?prefix=x')"
    assert "hush" not in repr(store._settings)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [name for name in sys.modules if name.startswith("lightning_redis.") and name != plugin.__name__]:
        monkeypatch.delitem(sys.modules, name)
    made: dict[str, Callable[[str], object]] = {}
    for register in (plugin.register_stores, plugin.register_keepers):
        register(made.__setitem__)
        with pytest.raises(MissingExtraError, match=re.escape(install_command("redis"))):
            made["redis"]("redis://host")


# servers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server whose settings tests change."""
    with RedisServer(tmp_path_factory.mktemp("odd-redis")) as server:
        yield server


@pytest.fixture
def server(odd: RedisServer) -> Iterator[RedisServer]:
    """It, as it should be, and empty."""
    yield odd
    for setting in ("appendonly yes", "appendfsync always", "maxmemory-policy noeviction", "maxmemory 0"):
        odd.command("CONFIG", "SET", *setting.split())
    odd.command("CONFIG", "SET", "requirepass", "")
    odd.command("FLUSHALL")


async def refused(url: str) -> StoreError:
    """The error that opening gives; the store object must be usable again afterwards."""
    store = RedisStore.from_url(url)
    with pytest.raises(StoreError) as caught:
        await store.open()
    with pytest.raises(StoreError, match="not open"):
        await store.list_runs()
    await store.close()
    return caught.value


async def accepted(url: str) -> None:
    store = RedisStore.from_url(url)
    await store.open()
    await store.put_state("run", "k", 1)
    await store.close()


@pytest.mark.parametrize(
    ("setting", "options", "words"),
    [
        ("appendonly no", (), "keeps no append-only file.*CONFIG SET appendonly yes"),
        ("appendonly no", ("durability=everysec",), "keeps no append-only file"),
        ("appendfsync everysec", (), "appendfsync everysec: a kill -9 of Redis.*CONFIG SET appendfsync always"),
        ("appendfsync everysec", ("durability=power",), "a power cut"),
        ("appendfsync no", ("durability=power",), "a power cut"),
        ("maxmemory-policy allkeys-lru", ("durability=none",), "would delete what it was given"),
    ],
)
async def test_a_server_that_would_lose_what_it_acknowledged_is_refused(
    server: RedisServer, setting: str, options: tuple[str, ...], words: str
) -> None:
    server.command("CONFIG", "SET", *setting.split())
    error = await refused(server.url(*options))
    assert re.search(words, str(error))
    assert server.command("DBSIZE") == b":0\r\n"


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("appendonly no", "durability=none"),
        ("appendfsync everysec", "durability=everysec"),
        ("appendfsync no", "durability=process"),
        ("appendfsync always", "durability=power"),
    ],
)
async def test_a_server_that_keeps_what_the_url_asks_for_is_taken(
    server: RedisServer, setting: str, options: str
) -> None:
    server.command("CONFIG", "SET", *setting.split())
    await accepted(server.url(options))


async def test_who_may_not_ask_for_the_setting_must_say_what_is_lost(server: RedisServer) -> None:
    server.command("ACL", "SETUSER", "app", "on", ">hush", "~lightning:*", "+@all", "-config")
    url = server.url().replace("redis://", "redis://app:hush@")
    error = await refused(url)
    assert "durability=everysec" in str(error)
    await accepted(f"{url}?durability=everysec")
    error = await refused(f"{url}?durability=everysec&prefix=other")
    assert "grant it" in str(error)
    assert "hush" not in str(error)
    server.command("ACL", "SETUSER", "app", "+config", "-hset")
    store = RedisStore.from_url(url)
    await store.open()
    with pytest.raises(StoreError, match="does not let this user") as caught:
        await store.put_state("run", "k", 1)
    assert not isinstance(caught.value, SchemaError)
    await store.close()


async def test_the_rights_that_the_documentation_names_are_enough(
    server: RedisServer, rollout: RolloutOf, call: CallOf
) -> None:
    text = Path(__file__).parents[3].joinpath("docs", "stores.md").read_text("utf-8")
    block = re.search(r"^ACL SETUSER (\w+) on >password (.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    server.command("ACL", "SETUSER", block[1], "reset", "on", ">password", *block[2].split())
    url = server.url().replace("redis://", f"redis://{block[1]}:password@")
    store = RedisStore.from_url(url)
    await store.open()
    await store.put_run(Run("run", "a run"))
    async with store.watch("run") as watch:
        await store.create_rollouts([rollout("a", resources={"w": 1}), rollout("b")])
        assert await watch.wait(60)
    (lease, _) = await store.lease("run", "w", limit=2)
    await store.renew(lease)
    await store.append([call(0)])
    await append_spans(store, [Span("a", 1, "t", "s")])
    await store.complete("a", 1, Outcome(reward=1.0))
    await store.commit_step(StepRecord("run", 1, 1, (("a", 1),), ("d",), "x"))
    assert await store.release("w") == 1
    await store.log_metrics("run", 0, {"loss": 1.0})
    await store.keep_state("run", "k", 1)
    await put_token(store, Token("t", Scope.ADMIN, "d"))
    await revoke_token(store, "t")
    for version in (1, 2):
        await put_resource(store, Resource("w", f"text {version}"))
        await set_alias(store, "w", "production", version)
    await roll_back_alias(store, "w", "production")
    assert len(await store.transitions("a")) == len(await spans(store, "a")) == 1
    await store.close()
    keeper = keeper_of(url)
    assert (await keeper.status()).calls == 1
    assert [weight.calls for weight in await keeper.weigh("run", ["g"])] == [1]
    await keeper.forget_calls("run", ["g"])
    await keeper.forget_run("run")
    assert (await keeper.status()).runs == 0


async def test_a_wrong_password_is_said_at_once_and_not_shown(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "right")
    try:
        for user in ("", ":hush@"):
            error = await asyncio.wait_for(refused(server.url().replace("redis://", f"redis://{user}")), 10)
            assert "user or the password" in str(error)
            assert "hush" not in str(error)
        await accepted(server.url().replace("redis://", "redis://:right@"))
    finally:
        store = RedisStore.from_url(server.url().replace("redis://", "redis://:right@"))
        await store.open()
        with store._link() as link:
            await link.reads.read((b"CONFIG", b"SET", b"requirepass", b""))
        await store.close()


async def test_a_server_that_is_not_there_is_waited_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"redis://:hush@127.0.0.1:{free_port()}?timeout=0.2"
    error = await refused(url)
    assert type(error) is UnavailableError
    assert "asking again may help" in str(error)
    assert "hush" not in str(error)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_tls_trusts_only_whom_it_is_told_to(redis_server: RedisServer, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *make.split(), *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with LossyProxy(redis_server.port, context=context) as proxy:
        url = f"rediss://localhost:{proxy.port}?prefix=tls&timeout=20"
        error = await asyncio.wait_for(refused(url), 10)
        assert "certificate" in str(error)
        assert "?ca=FILE" in str(error)
        await accepted(f"{url}&ca={certificate}")


# what is under the prefix ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("SET", "lightning:meta", '{"program":"lightning","schema":99,"id":"x"}'),
            "has schema 99, but this version",
        ),
        (("SET", "lightning:meta", '{"program":"lightning","schema":"1","id":"x"}'), "damaged schema version"),
        (("SET", "lightning:meta", '{"program":"other","schema":1,"id":"x"}'), "'other'"),
        (("SET", "lightning:meta", "\x00"), "damaged or another program's"),
        (("HSET", "lightning:meta", "a", "b"), "another program's"),
        (("SET", "lightning:jobs", "x"), r"begin with this prefix already \(lightning:jobs\)"),
    ],
)
async def test_what_is_foreign_or_of_another_schema_is_refused_untouched(
    server: RedisServer, command: tuple[str, ...], words: str
) -> None:
    server.command(*command)
    error = await refused(server.url())
    assert isinstance(error, SchemaError)
    assert re.search(words, str(error))
    assert server.command("DBSIZE") == b":1\r\n"
    await accepted(server.url("prefix=other"))


async def test_a_store_is_made_once_when_processes_open_it_together(server: RedisServer) -> None:
    stores = [RedisStore.from_url(server.url()) for _ in range(6)]
    await asyncio.gather(*(store.open() for store in stores))
    assert len({store._database for store in stores}) == 1
    await asyncio.gather(*(store.close() for store in stores))


@pytest.fixture
async def redis(redis_server: RedisServer, make_redis: Callable[[], RedisStore]) -> AsyncIterator[RedisStore]:
    """An open store with the run `run`."""
    store = make_redis()
    await store.open()
    await store.put_run(Run("run", "a run"))
    yield store
    await store.close()


async def names(store: RedisStore) -> set[str]:
    with store._link() as link:
        (found,) = await link.reads.read((b"KEYS", link.keys("*")))
    return {name.decode().removeprefix(f"{store._settings.prefix}:") for name in found}


async def test_every_key_is_under_the_prefix_and_described(redis: RedisStore, rollout: RolloutOf, call: CallOf) -> None:
    await redis.create_rollouts([rollout("a", resources={"w": 1}), rollout("b")])
    await redis.lease("run", "w", limit=2)
    await redis.append([call(0)])
    await append_spans(redis, [Span("a", 1, "t", "s")])
    await redis.complete("a", 1, Outcome(reward=1.0, labels={"call-0": Caller("x")}))
    await redis.commit_step(StepRecord("run", 1, 1, (("a", 1),), ("d",), "x"))
    await redis.complete("b", 1, Outcome(fault=Fault.AGENT))
    await redis.log_metrics("run", 0, {"loss": 1.0})
    await redis.put_state("run", "k", 1, once="an id")
    await put_token(redis, Token("t", Scope.ADMIN, "d"))
    await revoke_token(redis, "t")
    await put_resource(redis, Resource("w", "text"))
    await set_alias(redis, "w", "production", 1)
    described = re.findall(r"^    (?! )(.*?)(?:  .*)?$", keys.__doc__ or "", re.MULTILINE)
    known = {word for line in described for word in re.findall(r"[a-z]+", line)}
    there = await names(redis)
    found = {name.partition(":")[0] for name in there}
    assert found <= known
    assert {"calls", "roots", "uses", "resources", "answers", "once", "spans", "proofs", "revoked"} <= found
    assert any(name.startswith("resources:moves:") for name in there)


def test_scripts_touch_only_the_keys_they_are_given() -> None:
    """A key made up inside a script would be refused by a Redis that is one of several."""
    for file in resources.files("lightning_redis").joinpath("lua").iterdir():
        text = re.sub(r"--.*", "", file.read_text("utf-8"))
        for command, key in re.findall(r"redis\.call\('(\w+)'(?:, (KEYS\[[^\]]*\]?\)?\]|[^,)]+))?", text):
            assert command == "TIME" or re.fullmatch(r"[a-z]+|KEYS\[.*", key), (file.name, command, key)


async def test_time_removes_what_batches_were_answered(make_redis: Callable[[], RedisStore]) -> None:
    store = make_redis()
    await store.open()
    for number in range(5):
        await asyncio.gather(*(store.put_state("run", f"{number}/{i}", i) for i in range(10)))
        await store.put_state("run", "k", number)
    (answers,) = [name for name in await names(store) if name.startswith("answers:")]
    with store._link() as link:
        fields, left = await link.reads.read((b"HKEYS", link.keys(answers)), (b"TTL", link.keys(answers)))
    assert set(fields) == {b"connection", b"batch", b"0"}
    assert 3500 < left <= 3600
    await store.close()


# batches --------------------------------------------------------------------------------------------------------


async def test_what_waits_together_is_sent_together(redis: RedisStore) -> None:
    with redis._link() as link:
        before = link.writes._batches
    await asyncio.gather(*(redis.put_state("run", f"k{i}", i) for i in range(100)))
    assert link.writes._batches - before <= 2
    assert await redis.get_state("run", "k99") == 99


async def test_a_call_that_is_refused_fails_only_its_caller(redis: RedisStore) -> None:
    before, bad, after = await asyncio.gather(
        redis.put_state("run", "a", 1),
        set_alias(redis, "nobody", "production", 1),
        redis.put_state("run", "b", 1),
        return_exceptions=True,
    )
    assert isinstance(bad, StoreError)
    assert before is after is None
    assert [await redis.get_state("run", name) for name in "ab"] == [1, 1]


async def test_a_caller_that_left_before_its_turn_is_skipped(redis: RedisStore) -> None:
    with redis._link() as link:
        gone = asyncio.ensure_future(redis.put_state("run", "gone", 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert link.writes._next_batch() == []
    assert await redis.get_state("run", "gone") is None


async def test_a_fork_is_told_to_open_its_own(redis: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -7)
        with pytest.raises(StoreError, match="open a store of its own in each process"):
            await redis.list_runs()


# parents --------------------------------------------------------------------------------------------------------


async def stored_bytes(store: RedisStore, rollout: str = "a") -> dict[int, int]:
    with store._link() as link:
        (flat,) = await link.reads.read((b"HGETALL", link.keys("calls", 1, rollout)))
    return {int(seq): len(value) for seq, value in zip(flat[::2], flat[1::2], strict=True)}


async def test_shared_prefixes_are_stored_once(redis: RedisStore, rollout: RolloutOf, call: CallOf) -> None:
    """Turns of one agent, interleaved sub-agents, parallel choices, siblings of a group."""
    await redis.create_rollouts([rollout("a"), rollout("b"), rollout("far", group="other")])
    await redis.lease("run", "w", limit=3, ttl=3600)
    rng = random.Random(0)
    first, second = ([rng.randrange(150_000) for _ in range(1000)] for _ in range(2))
    given = [
        call(0, first),
        call(1, second),
        call(2, [*first, 4, 5, 9]),
        call(3, [*second, 4, 5, 9]),
        call(4, second),
        call(0, first, rollout="b"),
        call(1, second, rollout="b"),
        call(0, first, rollout="far"),
    ]
    await redis.append(given)
    sizes = {name: await stored_bytes(redis, name) for name in ("a", "b", "far")}
    assert {seq: size > 1000 for seq, size in sizes["a"].items()} == {0: True, 1: True, 2: False, 3: False, 4: False}
    assert [size > 1000 for name in ("b", "far") for size in sizes[name].values()] == [False, False, True]
    assert max(size for each in sizes.values() for size in each.values() if size <= 1000) < 300
    assert [c for calls in await redis.transitions_of([("a", 1), ("b", 1), ("far", 1)]) for c in calls] == given


async def test_another_process_finds_the_parents(
    redis: RedisStore, rollout: RolloutOf, call: CallOf, make_redis: Callable[[], RedisStore]
) -> None:
    await redis.create_rollouts([rollout("a"), rollout("b")])
    await redis.lease("run", "w", limit=2, ttl=3600)
    await redis.append([call(0, range(0, 50_000, 50))])
    other = RedisStore(redis._settings)
    await other.open()
    calls = [call(1, [*range(0, 50_000, 50), 4, 5]), call(2, range(0, 50_000, 50))]
    sibling = call(0, range(0, 50_000, 50), rollout="b")
    assert await other.append([*calls, sibling]) == 3
    own, siblings = await stored_bytes(other), await stored_bytes(other, "b")
    assert max(own[1], own[2], siblings[0]) < 300
    assert (await redis.transitions("a"))[1:] == calls
    assert await redis.transitions("b") == [sibling]
    await other.close()


async def test_a_branch_of_its_trunks_group_stores_no_token_of_the_prefix(
    redis: RedisStore, branched: BranchedIn
) -> None:
    turns, live = await branched(redis)
    sizes = {name: [*(await stored_bytes(redis, name)).values()] for name in live}
    assert max(*sizes["b0"], *sizes["b1"]) < 300 < 1000 < min(sizes["far"])
    again = RedisStore(redis._settings)  # another process, which remembers nothing
    await again.open()
    live["b2"] = [replace(each, rollout="b2") for each in live["b0"]]
    await again.append(live["b2"])
    assert max((await stored_bytes(again, "b2")).values()) < 300
    assert await again.transitions_of([("a", 1), *((name, 1) for name in live)]) == [turns, *live.values()]
    await again.close()


@pytest.mark.parametrize("lost", ["its own attempt's", "its group's", "its trunk's"])
async def test_a_parent_that_is_gone_is_none(redis: RedisStore, rollout: RolloutOf, call: CallOf, lost: str) -> None:
    """The database lost what it had acknowledged (a backup was restored): what is remembered of it must not be built upon."""
    branches = [rollout(name, parent=("a", 1, 1)) for name in ("c", "d")]
    await redis.create_rollouts([rollout("a"), rollout("b"), *branches])
    await redis.lease("run", "w", limit=4, ttl=3600)
    await redis.append([call(0, range(300)), call(1, range(500))])
    await redis.append([call(1, range(500), rollout="c")])  # since then the trunk's calls are remembered
    with redis._link() as link:
        await link.reads.read((b"DEL", link.keys("calls", 1, "a")))
    later = call(2, range(600), rollout={"its own attempt's": "a", "its group's": "b", "its trunk's": "d"}[lost])
    assert await redis.append([later]) == 1
    assert await redis.transitions(later.rollout) == [later]
    for again in range(3):  # and what is built upon it is sound
        assert await redis.append([call(10 + again, range(700), rollout=later.rollout)]) == 1
    assert len(await redis.transitions(later.rollout)) == 4


# damage ---------------------------------------------------------------------------------------------------------


def changed(value: bytes, change: Callable[[list[object]], None]) -> bytes:
    """A stored call with other columns."""
    length = int.from_bytes(value[8:12], "little")
    columns = json.loads(value[12 : 12 + length])
    change(columns)
    text = json.dumps(columns).encode()
    return value[:8] + len(text).to_bytes(4, "little") + text + value[12 + length :]


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda value: value[:20],
    "empty": lambda value: b"",
    "tokens": lambda value: value[:-4] + b"\0\0\0\0",
    "digest": lambda value: bytes(8) + value[8:],
    "no parent": lambda value: changed(value, lambda columns: columns.__setitem__(0, None)),
    "own parent": lambda value: changed(value, lambda columns: columns.__setitem__(0, 1)),
    "missing parent": lambda value: changed(value, lambda columns: columns.__setitem__(0, 77)),
    "odd parent": lambda value: changed(value, lambda columns: columns.__setitem__(0, {"a": 1})),
    "id": lambda value: changed(value, lambda columns: columns.__setitem__(1, "x")),
    "caller": lambda value: changed(value, lambda columns: columns.__setitem__(2, '["other"]')),
    "status": lambda value: changed(value, lambda columns: columns.__setitem__(4, "odd")),
    "fewer columns": lambda value: changed(value, lambda columns: columns.pop() and None),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
async def test_an_edited_call_is_noticed_and_stops_no_new_ones(
    redis: RedisStore, rollout: RolloutOf, call: CallOf, edit: Callable[[bytes], bytes]
) -> None:
    await redis.create_rollouts([rollout()])
    await redis.lease("run", "w", ttl=3600)
    await redis.append([call(i, range(100 * (i + 1)), [i]) for i in range(3)])
    with redis._link() as link:
        place = link.keys("calls", 1, "a")
        (value,) = await link.reads.read((b"HGET", place, b"1"))
        await link.reads.read((b"HSET", place, b"1", edit(value)))
    with pytest.raises(StoreError, match=r"transition \('a', 1, \d\) is corrupt"):
        await redis.transitions("a")
    other = RedisStore(redis._settings)  # which has to look for parents among what is damaged
    await other.open()
    assert await other.append([call(3, range(400))]) == 1
    await other.close()


@pytest.mark.parametrize("table", ["standing", "columns", "attempts"])
@pytest.mark.parametrize("text", ["x", "[]", "{}", "[1,2]", "\xff"])
async def test_damaged_tables_are_named(
    redis: RedisStore, rollout: RolloutOf, call: CallOf, table: str, text: str
) -> None:
    await redis.create_rollouts([rollout()])
    await redis.lease("run", "w")
    await redis.complete("a", 1, Outcome(reward=1.0))
    with redis._link() as link:
        field = b"a:1" if table == "attempts" else b"a"
        await link.reads.read((b"HSET", link.keys(table), field, text.encode("latin-1")))
    read = redis.attempts_of([("a", 1)]) if table == "attempts" else redis.get_rollout("a")
    if table == "attempts" and text == "{}":
        assert await read == [Attempt("a", 1)]
    else:
        with pytest.raises(StoreError, match="is corrupt in the database"):
            await read
