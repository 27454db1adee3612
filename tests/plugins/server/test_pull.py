"""`lightning pull`: weights from a folder and from a server, and what is refused on the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from lightning.config import Config
from lightning.errors import ConfigError, DataError, LightningError, UnavailableError
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.types import Scope
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import get_resource, put_resource, set_alias
from lightning_resources.weights import WEIGHTS_NAME, checked_weights, weights_content
from lightning_server.auth import Authenticator, issue_token
from lightning_server.pull_command import LEFT_FREE, pull
from lightning_server.serving import serve_store
from lightning_server.tokens import put_token
from lightning_server.weight_files import WeightFiles
from yarl import URL

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9000, "tokenizer.json": b'{"a": 1}'}
LIVE = f"{WEIGHTS_NAME}@live"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a model that is a version of the weights, which `live` points to."""
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    for name, data in FILES.items():
        (model / name).write_bytes(data)

    async def fill() -> None:
        store = plugins().store(sqlite_url(tmp_path / "run" / "lightning.db"))
        await store.open()
        made = await put_resource(store, Resource(WEIGHTS_NAME, weights_content(model), ResourceKind.WEIGHTS))
        await set_alias(store, WEIGHTS_NAME, "live", made.version)
        await put_resource(store, Resource("writer", "Write."))
        other = Resource("secret", {"path": "/etc", "files": {"hostname": "0" * 64}}, ResourceKind.WEIGHTS)
        await put_resource(store, other)
        await store.close()

    asyncio.run(fill())
    return tmp_path / "run"


def in_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def through_server(
    run: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[str], Any], scope: Scope = Scope.VIEWER
) -> None:
    """Call `act` with the URL of a server over the run's database."""

    async def main() -> None:
        async with serve_store(sqlite_url(run / "lightning.db"), Config(), run) as server:
            token, plain = issue_token(scope)
            await put_token(server.store, token)
            monkeypatch.setenv("LIGHTNING_TOKEN", plain)
            await asyncio.to_thread(act, server.url)

    asyncio.run(main())


def test_weights_of_this_machine_are_copied(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull(f"{run}#{LIVE}", tmp_path / "here")
    assert in_folder(tmp_path / "here") == FILES
    said = capsys.readouterr().out
    assert f"{WEIGHTS_NAME}@1 is in" in said
    assert "ollama create" in said and "convert_hf_to_gguf.py" in said  # noqa: PT018
    with pytest.raises(ConfigError, match="not empty"):
        pull(f"{run}#{LIVE}", tmp_path / "here")


def test_weights_of_a_server_are_downloaded(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through_server(run, monkeypatch, lambda url: pull(f"{url}#{LIVE}", tmp_path / "there"))
    assert in_folder(tmp_path / "there") == FILES


@pytest.mark.parametrize(
    ("named", "scope", "said"),
    [
        (f"{WEIGHTS_NAME}@gone", Scope.VIEWER, "There are no weights"),
        ("writer@1", Scope.VIEWER, "There are no weights"),
        ("secret@1", Scope.VIEWER, "the file hostname of secret@1 is gone, was changed, or is not below the folder"),
        (LIVE, Scope.RUNNER, "this needs viewer"),
    ],
)
def test_a_server_refuses_what_is_none_of_the_token_s_weights(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, scope: Scope, said: str
) -> None:
    def act(url: str) -> None:
        with pytest.raises(ConfigError, match=said):
            pull(f"{url}#{named}", tmp_path / "there")

    through_server(run, monkeypatch, act, scope)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing is left of it"


def test_a_file_that_was_changed_is_not_given_away(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "model" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match="overwritten"):
        pull(f"{run}#{LIVE}", tmp_path / "here")

    def act(url: str) -> None:
        with pytest.raises(ConfigError, match=r"model\.safetensors of .* was changed"):
            pull(f"{url}#{LIVE}", tmp_path / "there")

    through_server(run, monkeypatch, act)


def test_a_file_that_comes_otherwise_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(*_: object) -> int:
        return os.open(run / "lightning.db", os.O_RDONLY)

    monkeypatch.setattr("lightning_server.weight_files.WeightFiles._opened", opened)

    def act(url: str) -> None:
        with pytest.raises(DataError, match="came with the SHA-256"):
            pull(f"{url}#{LIVE}", tmp_path / "there")

    through_server(run, monkeypatch, act)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("place", ["a link to the file", "a link to its folder", "elsewhere", "a pipe"])
def test_a_server_gives_only_files_of_its_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Each has the digest that the version says, so that the place alone is why it is refused."""
    elsewhere = tmp_path / "elsewhere"
    (run / "model").rename(elsewhere)
    content = weights_content(elsewhere) | {"path": str(run / "model")}
    if place == "a link to its folder":
        (run / "model").symlink_to(elsewhere)
    elif place == "elsewhere":
        content["path"] = str(run / ".." / "elsewhere")
    else:
        (run / "model").mkdir()
        make = os.mkfifo if place == "a pipe" else lambda path: path.symlink_to(elsewhere / path.name)
        for name in FILES:
            make(run / "model" / name)
    store = plugins().store(sqlite_url(run / "lightning.db"))

    async def fill() -> None:
        await store.open()
        await put_resource(store, Resource("theirs", content, ResourceKind.WEIGHTS))
        await store.close()

    asyncio.run(fill())

    def act(url: str) -> None:
        with pytest.raises(ConfigError, match="is not below the folder from which this server gives files"):
            pull(f"{url}#theirs@1", tmp_path / "there")

    through_server(run, monkeypatch, act)


async def test_a_file_that_is_put_in_another_ones_place_is_not_sent(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment at which a file was found to be the right one and that at which it is sent."""
    store = plugins().store(sqlite_url(run / "lightning.db"))
    await store.open()
    files = WeightFiles(store, Authenticator(store), run)
    weights = run / "model" / "model.safetensors"
    hashed = WeightFiles._digest

    async def swapped(self: WeightFiles, file: int) -> str:
        digest = await hashed(self, file)
        weights.unlink()
        weights.symlink_to(run / "lightning.db")
        return digest

    monkeypatch.setattr(WeightFiles, "_digest", swapped)
    resource = await get_resource(store, WEIGHTS_NAME, 1)
    assert resource is not None
    file = await files._opened(resource, weights.name)
    assert os.pread(file, 1 << 30, 0) == FILES[weights.name]
    os.close(file)
    await store.close()


async def test_a_file_without_end_keeps_nobody_waiting(run: Path) -> None:
    """Nor the server from ending: it has holes, takes no room on the disk, and would be read for hours."""
    with (run / "model" / "config.json").open("wb") as file:
        file.truncate(1 << 42)
    async with serve_store(sqlite_url(run / "lightning.db"), Config(), run) as server:
        token, plain = issue_token(Scope.VIEWER)
        await put_token(server.store, token)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {plain}"}) as client:
            one = f"{server.url}/weights/{WEIGHTS_NAME.replace('/', '%2F')}@1"
            endless = [asyncio.create_task(client.get(URL(f"{one}/config.json", encoded=True))) for _ in range(10)]
            async with client.get(URL(f"{one}/model.safetensors", encoded=True)) as reply:
                assert await reply.read() == FILES["model.safetensors"]
            assert await asyncio.to_thread(int, "1") == 1, "the threads of everybody else are free"
            for each in endless:
                each.cancel()
            await asyncio.wait(endless)


def version(files: object, **fields: object) -> bytes:
    """What a server says of a version of the weights."""
    content = {"path": "/somewhere", "files": files}
    resource = {
        "name": WEIGHTS_NAME,
        "kind": "weights",
        "content": content,
        "metadata": {},
        "version": 1,
        "created_at": 0.0,
    }
    return json.dumps({**resource, **fields}).encode()


def of_a_file(name: str) -> bytes:
    return version({name: hashlib.sha256(b"{}").hexdigest()})


NO_END = [("transfer-encoding", "chunked")]
GOOD = of_a_file("config.json")
GZIP = [("content-encoding", "gzip")]


@pytest.mark.parametrize(
    ("said", "status", "headers", "refused"),
    [
        (b"[]", 200, [], "it must be an object, a Resource"),
        (b'{"content": {"files": {"a": "b"}}}', 200, [], "Is it a Lightning Server"),
        (b"[" * 100_000, 200, [], "is not JSON"),
        (b"{}", 200, [("content-type", "application/json; charset=hex")], "Is it a Lightning Server"),
        (version({"a": "b"}, name="x\x1b[2J"), 200, [], "cannot name a resource"),
        (version({"a": "b"}, version="one"), 200, [], "version"),
        (version({}), 200, [], "have no files"),
        (version({str(n): "0" * 64 for n in range(10_001)}), 200, [], "more than 10000"),
        (version({"a": 1}), 200, [], "without a SHA-256"),
        (version({"a": "\x1b[2J"}), 200, [], "without a SHA-256"),
        *(
            (of_a_file(name), 200, [], "is no plain name")
            for name in ("a\x00b", "a\x1b[2Jb", "a\nb", "\ud800", "../a", "..", "")
        ),
        (b" " * (5 << 20), 200, [], "more than 4 MiB"),
        (b"", 302, [("location", "http://127.0.0.1:9/")], "refuses: status 302"),
        (
            json.dumps({"error": {"type": "forbidden", "message": "no\n\nerror: yes " + 5000 * "y"}}).encode(),
            403,
            [],
            "refuses: no error: yes y+$",
        ),
        (json.dumps({"error": {"type": "forbidden", "message": [1]}}).encode(), 500, [], "refuses: status 500"),
    ],
)
def test_a_hostile_answer_is_one_line_of_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    status: int,
    headers: list[tuple[str, str]],
    refused: str,
) -> None:
    hostile(tmp_path, monkeypatch, [(status, headers, said)], refused)


@pytest.mark.parametrize(
    ("headers", "body", "refused"),
    [
        ([("content-length", str(3 << 30))], b"0" * 1000, "3.22 GB, and 0.00 GB may still come: raise --max-gb"),
        ([("content-length", str(1 << 60))], b"0" * 1000, "raise --max-gb"),
        (NO_END, b"3e8\r\n" + b"0" * 1000, "does not say how long config.json is"),
        ([*GZIP, ("content-length", "1000")], b"0" * 1000, "or compresses it"),
        ([("content-length", "3")], b"{}\n", "came with the SHA-256"),
        ([("content-length", "3")], b"{}", "did not give the weights"),
    ],
)
def test_no_byte_is_written_that_was_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: list[tuple[str, str]], body: bytes, refused: str
) -> None:
    hostile(tmp_path, monkeypatch, [(200, [], GOOD), (200, headers, body)], refused, max_gb=0.001)


def test_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=LEFT_FREE + 1))
    hostile(tmp_path, monkeypatch, [(200, [], GOOD), (200, [("content-length", "2")], b"{}")], "and the disk of")


def hostile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[int, list[tuple[str, str]], bytes]],
    refused: str,
    **how: Any,
) -> None:
    """Pull from a server that gives these answers, one to each request; all is refused, in one line, and nothing is left."""
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_x")
    written: list[int] = []
    removed = shutil.rmtree

    def remove(path: Path, *, ignore_errors: bool) -> None:
        written.extend(file.stat().st_size for file in path.glob("*"))
        removed(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)

    async def main() -> None:
        left = iter(answers)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            status, headers, body = next(left)
            if not {"content-length", "transfer-encoding"} & dict(headers).keys():
                headers = [*headers, ("content-length", str(len(body)))]
            head = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("connection", "close")])
            writer.write(f"HTTP/1.1 {status} OK\r\n{head}\r\n".encode() + body)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        place = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            with pytest.raises(LightningError, match=refused) as caught:
                await asyncio.to_thread(pull, f"{place}#{LIVE}", tmp_path / "there", **how)
            assert "\n" not in str(caught.value)
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(main())
    assert sum(written) <= 3
    assert not [*tmp_path.iterdir()], "nothing is left of it"


def test_a_record_that_names_no_folder_is_one_line_of_error(tmp_path: Path) -> None:
    resource = Resource("w", {"path": "a\x00b", "files": {}}, ResourceKind.WEIGHTS)
    with pytest.raises(ConfigError, match="cannot be read"):
        checked_weights(resource)


def test_without_a_token_or_a_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set the variable LIGHTNING_TOKEN"):
        pull(f"http://127.0.0.1:1#{LIVE}", tmp_path / "there")
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_x")
    with pytest.raises(UnavailableError, match="did not give the weights"):
        pull(f"http://127.0.0.1:1#{LIVE}", tmp_path / "there")


@pytest.mark.parametrize("most", [float("nan"), float("inf"), -1.0])
def test_what_is_no_number_of_gigabytes_is_refused(most: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-gb (nan|inf|-1\.0): give a number of gigabytes"):
        pull(f"http://127.0.0.1:1#{LIVE}", tmp_path / "here", max_gb=most)
    assert not (tmp_path / "here").exists()
