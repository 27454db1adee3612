"""`lightning pull`: weights from a folder and from a server, and what is refused on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.pull import pull
from lightning.config import Config
from lightning.errors import ConfigError, DataError, UnavailableError
from lightning.plugins import plugins
from lightning.server.auth import issue_token
from lightning.server.serving import serve_store
from lightning.store.url import sqlite_url
from lightning.trainer.checkpoints import WEIGHTS_NAME, weights_content
from lightning.types import Resource, ResourceKind, Scope

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
        made = await store.put_resource(Resource(WEIGHTS_NAME, weights_content(model), ResourceKind.WEIGHTS))
        await store.set_alias(WEIGHTS_NAME, "live", made.version)
        await store.put_resource(Resource("writer", "Write."))
        other = Resource("secret", {"path": "/etc", "files": {"hostname": "0" * 64}}, ResourceKind.WEIGHTS)
        await store.put_resource(other)
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
            await server.store.put_token(token)
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
        ("secret@1", Scope.VIEWER, "the file hostname of secret@1 is gone or was changed"),
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
    monkeypatch.setattr(
        "lightning.server.weight_files.WeightFiles._file", lambda self, resource, name: run / "lightning.db"
    )

    def act(url: str) -> None:
        with pytest.raises(DataError, match="came with the SHA-256"):
            pull(f"{url}#{LIVE}", tmp_path / "there")

    through_server(run, monkeypatch, act)
    assert not (tmp_path / "there").exists()


def test_without_a_token_or_a_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set LIGHTNING_TOKEN"):
        pull(f"http://127.0.0.1:1#{LIVE}", tmp_path / "there")
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_x")
    with pytest.raises(UnavailableError, match="did not give the weights"):
        pull(f"http://127.0.0.1:1#{LIVE}", tmp_path / "there")
