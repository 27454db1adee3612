"""The commands for many machines: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.config import load_config
from lightning.testing.tiny_models import make_tiny_model


def test_a_server_says_how_to_join_it(lightning, tmp_path: Path) -> None:
    place = tmp_path / "shared.db"
    ran = lightning("serve", "--store", f"sqlite:///{place}", "--seconds", "0.05")
    assert ran.code == 0, ran.err
    assert f"the first admin token is in {tmp_path / 'admin-token'}" in ran.out
    assert f"LIGHTNING_TOKEN=$(cat {tmp_path / 'runner-token'}) lightning runner --server http://127.0.0.1:" in ran.out
    secret = (tmp_path / "admin-token").read_text().strip()
    assert secret not in ran.out + ran.err
    (tmp_path / "runner-token").unlink()
    again = lightning("serve", "--store", str(place), "--seconds", "0.05")
    assert "LIGHTNING_TOKEN=TOKEN lightning runner" in again.out
    assert "admin" not in again.out


@pytest.mark.parametrize("arguments", [(), ("a-model", "--store", "memory://")])
def test_a_model_or_a_database_is_served(lightning, arguments: tuple[str, ...]) -> None:
    ran = lightning("serve", *arguments)
    assert (ran.code, ran.err) == (
        2,
        "error: give a model to serve, or --store URL to serve a database: one of the two\n",
    )


def test_a_served_model_has_no_agents_to_give_prompts_to(lightning, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings, out = tmp_path / "settings.toml", tmp_path / "out"
    settings.write_text('[runner]\nprompts = { writer = "Write.", judge = "Judge." }\n')
    ran = lightning("serve", str(tmp_path), "--config", str(settings), "--out", str(out))
    assert ran.code == 2
    assert "runner.prompts gives prompts to judge, writer, but a served model's agents run elsewhere" in ran.err
    assert "--set 'runner.prompts={}'" in ran.err
    assert not out.exists()
    assert not load_config(settings, ["runner.prompts={}"]).runner.prompts, "the cure"


def test_a_runner_needs_a_token(lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_TOKEN", raising=False)
    ran = lightning("runner", "json:dumps", "--server", "http://127.0.0.1:1")
    assert ran.code == 2
    assert "set the variable LIGHTNING_TOKEN" in ran.err
    ran = lightning("runner", "json:dumps", "--server", "http://127.0.0.1:1", "--token-file", str(tmp_path / "none"))
    assert ran.code == 2
    assert f"the token in {tmp_path / 'none'} cannot be read" in ran.err


def test_an_agent_that_cannot_be_called_is_refused_before_anything_starts(
    lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "uncallable.py").write_text("class Agent: ...\ndef agent(task): ...\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    out = tmp_path / "run"
    train = ("--model", str(tmp_path / "model"), "--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(out))
    monkeypatch.setenv("LIGHTNING_TOKEN", "token")
    join = ("--server", "http://127.0.0.1:1")
    for name, says in (
        ("Agent", "uncallable.Agent is a class"),
        ("agent", "uncallable.agent, which takes (task), cannot"),
    ):
        for command in (("train", *train), ("train", "--dev", *train), ("train", "--runner", "inline", *train)):
            ran = lightning(command[0], f"uncallable:{name}", *command[1:])
            assert (ran.code, says in ran.err) == (2, True), ran.err
        ran = lightning("runner", f"uncallable:{name}", *join)
        assert (ran.code, says in ran.err) == (2, True), ran.err
    assert not out.exists()


def test_a_trainer_needs_an_agent_and_a_database(tmp_path: Path) -> None:
    from lightning import Trainer
    from lightning.errors import ConfigError

    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"there is no agent: give one, or runner='remote'"):
        Trainer(model, out=tmp_path / "run").fit(None, ["a task"])
    with pytest.raises(ConfigError, match=r"http://\*\*\*@here is a server: a trainer needs the database itself"):
        Trainer(model, store="http://me:hunter2@here")
