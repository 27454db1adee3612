"""Policies with a base of their own, or with all weights trained: each has its own vLLM, in a whole run."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.cli.output import with_store
from lightning.config import config_model, with_settings
from lightning.errors import ConfigError
from lightning.policy_server.model_folder import ADAPTERS_OF_ALL, check_weights, read_header
from lightning.policy_server.protocol import Probe, Update
from lightning.policy_server.weights import FromDisk
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.testing import vllm_replies
from lightning.testing.fake_vllm import Reply
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import Trainer, stack
from lightning.trainer.model import policy_set_of
from lightning.types import LLM, CallStatus, Json, StepRecord, Task, Transition
from lightning_branching.branching import branch
from lightning_branching.policies import find_model
from lightning_proof.audit import audit
from lightning_server.policies import policies_in
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.plugins.debug.evaluating import FIXED, said, write_tasks
from tests.plugins.replicas.test_training import read
from tests.servers.replica import Replica, TellingVLLM

VOCAB = 320
GAP = 1e-3
"""Largest difference (nats) that counts as the same policy."""


class Own(Replica):
    """A scripted vLLM that has the names of its own policies alone, and checks its part of new weights as ours does."""

    def __init__(self, folder: Path, transfer: Any) -> None:
        self.folder, self.way, self.parts, turn = folder, transfer(FromDisk()), list[str](), itertools.count()
        super().__init__(lambda body: Reply(f"{next(turn)} and more"))

    def _made(self, port: int, version: int) -> TellingVLLM:
        made = super()._made(port, version)
        (alias,) = made.aliases
        made.aliases = (alias, *sorted({name for _, name in self.way.models(alias)} - {alias}))
        return made

    @property
    def models(self) -> Sequence[tuple[str, str]]:  # type: ignore[override]
        found: Sequence[tuple[str, str]] = self.way.models(self.alias)
        return found

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        if weights is not None and (part := self.way.part(weights)) is not None:
            check_weights(part, self.folder)
            self.parts.append(part.name)
        own = dict(self.models)
        update = await super().update(weights, version, probes)
        return Update(version, update.in_flight, served=[
            [*probe.logprobs[1:]] if probe.policy in own else [] for probe in probes
        ])  # fmt: skip


def agents(*names: str) -> Any:
    def agent(task: Task, llm: LLM) -> float:
        """Ask as each of these agents, one after another."""
        said = ""
        for name in names:
            body = {
                "model": llm.model,
                "messages": [{"role": "user", "content": f"{task.input} {said}"}],
                "max_tokens": 8,
            }
            headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
            headers["x-lightning-caller"] = json.dumps({"agent": name, "path": [name]})
            request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as reply:
                said += json.load(reply)["choices"][0]["message"]["content"]
        return float(zlib.crc32(said.encode()) % 5)

    return agent


def train(model: Path, out: Path, settings: dict[str, Any], steps: int, *names: str, algorithm: str = "") -> None:
    Trainer(
        model,
        f"grpo:group_size=4{algorithm}",
        runner="inline",
        config=with_settings(config_model()(), {"runner.concurrency": 4, "policy_server.device": "cpu", **settings}),
        steps=steps,
        tasks_per_step=2,
        lr=1e-2,
        out=out,
        resume=out.exists(),
        progress=False,
    ).fit(agents(*names), ["one", "two", "three"])


def found(out: Path) -> tuple[list[StepRecord], list[Transition]]:
    """The steps of a run, and its answered calls."""
    records, calls, _ = asyncio.run(read(out, out.name))
    return records, [call for call in calls if call.status is CallStatus.OK]


def test_each_base_and_each_whole_policy_has_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_replies, "VOCABULARY", VOCAB)
    model = make_tiny_model(tmp_path / "model", vocab=VOCAB)
    other = make_tiny_model(tmp_path / "other", vocab=VOCAB, hidden=128, seed=1)
    servers: list[Own] = []

    def make(folder: Path, *_: object, transfer: Any, **__: object) -> Own:
        servers.append(Own(folder, transfer))
        return servers[-1]

    monkeypatch.setattr(stack, "make_policy_server", make)
    monkeypatch.chdir(tmp_path)
    settings = {
        "policies": {
            "writer": {"agents": ["writer"], "lora": {"rank": 4}},
            "editor": {"agents": ["editor"]},
            "critic": {"agents": ["critic"], "base": "other", "lora": {"rank": 2}},
            "judge": {"agents": ["judge"], "base": str(other), "train": False},
        }
    }
    names = ("writer", "editor", "critic", "judge", "someone")
    for steps in (1, 2):  # the second call goes on with the run
        servers.clear()
        train(model, tmp_path / "run", settings, steps, *names, algorithm=",correction.kind=none")

    assert [server.folder for server in servers] == [model, other, model]
    assert [sorted(dict(server.models)) for server in servers] == [["base", "writer"], ["critic", "judge"], ["editor"]]
    parts = ["writer.safetensors", "critic.safetensors", "editor.safetensors"]
    assert [server.parts for server in servers] == [[part] * 2 for part in parts], "at the resume, and after the step"
    records, calls = found(tmp_path / "run")
    assert [record.step for record in records] == [1, 2]
    asked = [{request.request_id for request in server.fake.requests} for server in servers]
    answered: dict[str, set[int]] = defaultdict(set)
    for call in calls:
        step = int(call.rollout.split("/")[1])
        trained = call.policy in ("writer", "editor", "critic")
        assert {run.version for run in call.versions} == {step - 1 if trained else 0}
        answered[call.policy] |= {
            number for number, ids in enumerate(asked) if call.id.removeprefix("chatcmpl-") in ids
        }
    assert answered == {"writer": {0}, "base": {0}, "critic": {1}, "judge": {1}, "editor": {2}}

    assert {f"policy/{name}/grad_norm" for name in ("writer", "editor", "critic")} <= records[-1].metrics.keys()
    exported, state = tmp_path / "run" / "model", tmp_path / "run" / "checkpoints" / "step-00000002"
    assert {path.name for path in (exported / "adapters").iterdir()} == {"writer", "critic"}
    for name, base in (("writer", model), ("critic", other), ("editor", model)):
        check_weights(exported / name, base)
        assert AutoModelForCausalLM.from_pretrained(exported / name).config.hidden_size == (
            128 if base is other else 64
        )
    kept, begun = load_file(state / "editor" / "weights.safetensors"), load_file(model / "model.safetensors")
    left = load_file(exported / "editor" / "model.safetensors")
    assert all(torch.equal(left[key], kept[key]) for key in left)
    assert not torch.equal(left["model.embed_tokens.weight"], begun["model.embed_tokens.weight"])
    assert not (exported / ADAPTERS_OF_ALL).exists()
    servers.clear()
    _check_evaluated(tmp_path, servers, monkeypatch)
    _check_named_policies(tmp_path, other, max(calls, key=lambda call: call.rollout).rollout, monkeypatch)


def _check_named_policies(place: Path, other: Path, rollout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one server does not answer all policies of the run `place`/run, and that each is found by its name: also from
    a folder where the relative name of a base is that of nothing."""
    folder, into, config = place / "run", place / "made", with_settings(config_model()(), {})
    why = (
        r"the policies of the run run have no model in common \(critic begins as other; judge begins as .*other; all weights "
        "of editor are trained"
    )
    with pytest.raises(ConfigError, match=rf"{why}.*: serve one of its policies, as {folder}/model/critic"):
        asyncio.run(policies_in(folder))
    with pytest.raises(ConfigError, match=rf"{why}.*: name the weights of one policy .*--weights RUN/model/NAME"):
        branch(rollout, agents("writer"), at=1, runs=str(place), runner="inline")
    named = find_model("run/model/editor", place, into, config)
    assert named.folder == folder / "model" / "editor"
    assert find_model("run/model/critic@0", place, into, config).folder == other.resolve()
    with pytest.raises(ConfigError, match=f"the policy judge is not trained: it is {other}"):
        find_model("run/model/judge", place, into, config)
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert not asyncio.run(with_store(store_in(folder), lambda store: audit(store, "run"))).findings
    several = policy_set_of(asyncio.run(with_store(store_in(folder), lambda store: _config_of(store))))
    assert several is not None
    assert several.described == {
        "writer": "answers writer; trained with a learning rate of 0.01 and adapters of rank 4",
        "editor": "answers editor; trains all weights of the model with a learning rate of 0.01",
        "critic": "answers critic; trained with a learning rate of 0.01 and adapters of rank 2 on other",
        "judge": f"answers judge; not trained, stays {other}",
    }


def _check_evaluated(place: Path, servers: list[Own], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `lightning eval` and `ab` of the run `place`/run have each agent answered by its policy, with the weights of
    the step."""
    module = "from tests.plugins.policies.test_own_servers import agents\nagent = agents('writer', 'editor', 'critic', 'judge')"
    (place / "asking.py").write_text(module)
    write_tasks(place / "tasks.jsonl", 2)
    monkeypatch.syspath_prepend(str(place))
    given = ["asking:agent", "--tasks", "tasks.jsonl", "--bounds", "0,4", "--runs", ".", *FIXED]
    given += ["--set", "policy_server.device=cpu"]
    assert said(["eval", "run@1", *given, "-n", "1", "--out", "evaluated"]) == 0
    assert [server.folder.name for server in servers] == ["model", "other", "model"]
    assert [server.parts for server in servers] == [[f"{name}.safetensors"] for name in ("writer", "critic", "editor")]
    _, calls = found(place / "evaluated")
    for name in ("writer", "editor", "critic", "judge"):
        versions = {run.version for call in calls if call.policy == call.caller.name == name for run in call.versions}
        assert versions == {0 if name == "judge" else 1}
    pair = ["ab", *given, "--model", "run@0,run@2"]
    assert said([*pair, "--out", "promoted", "--promote", "best"]) == 2
    servers.clear()
    assert said([*pair, "--out", "compared", "--batch", "2"]) in (0, 3, 4)
    assert [len(server.parts) for server in servers] == [0, 0, 0, 1, 1, 1], (
        "before the first step there is nothing to load"
    )


async def _config_of(store: Store) -> Mapping[str, Json]:
    run = await store.get_run("run")
    assert run is not None
    return run.config


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_real_vllms_of_two_bases_are_both_trained_whole(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocab=VOCAB)
    other = make_tiny_model(tmp_path / "other", vocab=400, hidden=128, seed=1)
    settings = {
        "policies": {"writer": {"agents": ["writer"]}, "critic": {"agents": ["critic"], "base": str(other)}},
        "policy_server.max_model_len": 512,
        "engine.dtype": "float32",
    }
    train(model, tmp_path / "run", settings, 2, "writer", "critic")
    records, calls = found(tmp_path / "run")
    assert [record.step for record in records] == [1, 2]
    assert len(calls) >= 32
    for call in calls:
        assert {(run.policy, run.version) for run in call.versions} == {
            (call.policy, int(call.rollout.split("/")[1]) - 1)
        }
    vocabulary = {"writer": VOCAB, "critic": 400}
    for name, base in (("writer", model), ("critic", other)):
        own = [call for call in calls if call.policy == name]
        assert len(own) >= 16
        assert max(max(call.response_ids) for call in own) < vocabulary[name]
        for record in records:
            if f"policy/{name}/tokens" in record.metrics:
                assert record.metrics[f"policy/{name}/max_logprob_gap"] <= GAP, "vLLM has this policy's weights"
        exported = load_file(tmp_path / "run" / "model" / name / "model.safetensors")
        kept = load_file(tmp_path / "run" / "checkpoints" / "step-00000002" / name / "weights.safetensors")
        assert exported.keys() == read_header(base / "model.safetensors").keys()
        assert all(torch.equal(exported[key], kept[key]) for key in exported)
        begun = load_file(base / "model.safetensors")
        assert any(not torch.equal(exported[key], begun[key]) for key in begun), "it was trained"
    assert any(call.policy == "critic" and max(call.response_ids) >= VOCAB for call in calls), (
        "ids of its own tokenizer"
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"probe_gap"') == 2, "each update was probed"
