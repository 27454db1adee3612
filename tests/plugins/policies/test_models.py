"""The models that a run with several policies leaves: each is found, kept as a resource and forked by its name."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import with_store
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.policy_server.model_folder import ADAPTERS_OF_ALL
from lightning.store.places import policy_in, store_in
from lightning.store.protocol import Store
from lightning.trainer.model import adapters_of, models_in, resolve_model
from lightning.types import LLM, Task
from lightning_branching.policies import EvaluatedModel, find_model
from lightning_resources.operations import list_resources
from lightning_server import serving
from lightning_server.policies import policies_in
from safetensors.torch import load_file

from tests.core.trainer.test_families import Served
from tests.core.trainer.test_tiny_run import equal, model, state
from tests.core.trainer.test_tiny_run import train as train

POLICIES = {
    "policies__writer__models": ["writer"],
    "policies__editor__models": ["editor"],
    "policies__judge__models": ["judge"],
    "policies__judge__train": False,
    "engine__lora": {"rank": 2},
}


def crew(task: Task, llm: LLM) -> float:
    """Asks the writer and the editor; the reward depends on what the editor said."""
    return float("yes" in [ask(llm, name, f"{name}: {task.input}") for name in ("writer", "editor")][-1])


def ask(llm: LLM, model: str, text: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@pytest.fixture
def run(train: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`run(out, steps, ...)`: a run of the crew with the policies writer, editor and judge, which is not trained."""
    monkeypatch.setattr("tests.core.trainer.test_tiny_run.agent", crew)
    return lambda out, steps, **more: train(out, steps, **{**POLICIES, **more})


def asked(folder: Path, ask: Callable[[Store], Any]) -> Any:
    return asyncio.run(with_store(store_in(folder), ask))


def test_a_policy_s_model_is_found_kept_and_forked_by_its_name(run: Any, train: Any, tmp_path: Path) -> None:
    folder, runs, into = run("runs/mine", 2), tmp_path / "runs", tmp_path / "made"
    own = folder / "model"
    assert {name: path.name for name, path in models_in(own).items()} == {"editor": "editor", "writer": "writer"}
    with pytest.raises(
        ConfigError, match=rf"{own} has no model of its own, but those of editor, writer: .* {own}/editor"
    ):
        resolve_model(own)

    last, first = (find_model(f"mine/model/writer{at}", runs, into, Config()) for at in ("", "@1"))
    assert (last.name, last.folder, last.weights) == ("mine/model/writer@2", own / "writer", "policy/writer/weights")
    assert first.name == "mine/model/writer@1"
    assert not equal(model(first.folder), model(last.folder))
    assert find_model("mine/model/editor@1", runs, into, Config()).folder.parent == first.folder.parent, "made once"
    assert find_model("mine@0", runs, into, Config()).folder == (tmp_path / "folder").resolve()
    for name, words in (
        ("mine", rf"trains the policies editor, writer, each with .*: name one of them, as {own}/editor@2"),
        ("mine/model/judge", rf"and not 'judge': .* A policy that is not trained is the run's model, {folder}@0"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_model(name, runs, into, Config())
    _check_all(folder, runs, into, tmp_path / "folder")

    versions = asked(folder, lambda store: list_resources(store, "policy/writer/weights"))
    assert [version.metadata["probe"]["dtype"] for version in versions] == ["float32"]
    assert "probes" not in versions[0].metadata
    assert find_model(f"{folder}#policy/writer/weights@1", runs, into, Config()).folder == own / "writer"

    forked = train("runs/forked", 1, from_run="mine/model/writer@1")
    assert equal(model(forked / "forked"), model(first.folder))
    train("runs/forked", 2, from_run="mine/model/writer@1", resume=True)
    with pytest.raises(ConfigError, match=r"'forked' began with the weights of mine/model/writer@1, not of mine"):
        train("runs/forked", 3, from_run="mine/model/editor@1", resume=True)
    with pytest.raises(ConfigError, match=r"the run forked has one policy, and none called 'writer': write .*forked@2"):
        find_model("forked/model/writer", runs, into, Config())
    with pytest.raises(ConfigError, match=rf"trains the policies editor, writer, .* as {own}/editor@2"):
        train("runs/other", 1, from_run="mine")
    again = run("runs/again", 1, from_run="mine")
    assert equal(state(again / "checkpoints/step-00000000/writer"), state(folder / "checkpoints/step-00000002/writer"))


def _check_all(folder: Path, runs: Path, into: Path, base: Path) -> None:
    """Check that a run's step names all its policies, where they may be together."""
    begun, first, last = (find_model(f"mine{at}", runs, into, Config(), together=True) for at in ("@0", "@1", ""))
    assert [each.name for each in (begun, first, last)] == ["mine@0", "mine@1", "mine@2"]
    assert [each.folder for each in (begun, first, last)] == [base.resolve()] * 3
    assert (begun.trained, last.trained) == (None, folder / "model" / ADAPTERS_OF_ALL)
    assert first.trained is not None
    one, other = (load_file(each.trained) for each in (first, last) if each.trained)
    assert one.keys() == other.keys()
    assert not equal(one, other)
    written = first.trained.stat().st_mtime_ns
    assert first.serves_as(find_model("mine@1", runs, into, Config(), together=True))
    assert first.trained.stat().st_mtime_ns == written, "made once"
    assert not any(last.serves_as(each) for each in (begun, first, EvaluatedModel("base", last.folder)))
    given = with_settings(Config(), {"policies.else.agents": ["*"], "engine.lora.rank": 8, "trainer.seed": 5})
    within = first.within(given)
    assert {name: lora and lora.rank for name, lora in adapters_of(within).items()} == {"writer": 2, "editor": 2}
    assert within.trainer == given.trainer


def test_a_model_in_a_run_s_folder_is_a_policy_s_and_others_are_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lightning.db").touch()
    assert policy_in(tmp_path / "run/model/writer") == (tmp_path / "run", "writer")
    for other in ("run", "run/model", "run/adapters/writer", "elsewhere/model/writer"):
        assert policy_in(tmp_path / other) == (tmp_path / other, "")


class Adapted(Served):
    """A scripted vLLM that has an adapter for each trained policy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fake.aliases = ("tiny/writer", "tiny/editor")
        self.models = (("writer", "tiny/writer"), ("editor", "tiny/editor"), ("judge", "tiny"))


async def test_all_policies_of_a_run_are_served_by_their_names(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await asyncio.to_thread(run, "runs/mine", 1)
    policies = await policies_in(folder)
    assert (policies.names, policies.base) == (["writer", "editor", "judge"], (tmp_path / "folder").resolve())
    vllm, given = Adapted(policies.base), []
    monkeypatch.setattr(serving, "make_policy_server", lambda model, config, **_: given.append((model, config)) or vllm)
    async with serving.serve(policies.base, Config(), tmp_path / "served", policies=policies) as server:
        ((base, config),) = given
        assert base == policies.base
        assert {name: lora and lora.rank for name, lora in adapters_of(config).items()} == {"writer": 2, "editor": 2}
        (sent,) = vllm.sent
        assert {name.partition("|")[0] for name in sent} == {"writer", "editor"}
        llm = await server.open_session("shell", 60)
        for name in policies.names:
            await asyncio.to_thread(ask, llm, name, "hello")
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(ask, llm, "gpt-4o", "hello")
        assert refused.value.code == 404
        told = json.load(refused.value)["error"]["message"]
        assert "ask for the model 'writer' or 'editor' or 'judge'" in told
        assert [each.body["model"] for each in vllm.fake.requests] == [model for _, model in vllm.models]
        found = [
            call.policy
            for each in await server.store.list_runs()
            for rollout in (await server.store.list_rollouts(each.id)).items
            for call in await server.store.transitions(rollout.id)
            if call.status.answered
        ]
        assert sorted(found) == ["editor", "judge", "writer"]

    (policies.base / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match=r"is not the one that the policies of .* began as: its weights have changed"):
        await policies_in(folder)
