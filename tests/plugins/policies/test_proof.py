"""A run with several policies is audited, resumed and trained again from its record, each policy by its name."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.app import main
from lightning.policy_server.model_folder import ADAPTERS_OF_ALL, hash_weights
from lightning.types import LLM, POLICY, Task, Transition
from lightning_branching.branching import BranchReport, branch
from lightning_branching.retrain import Retraining
from lightning_console.places import Places
from lightning_console.router import show
from lightning_proof.audit import audit
from safetensors.torch import load_file, save_file

from tests.core.trainer.test_tiny_run import equal, state
from tests.core.trainer.test_tiny_run import train as train
from tests.plugins.branching.test_retrain import retrained, steps_of
from tests.plugins.policies.test_models import POLICIES, asked
from tests.plugins.proof.test_audit import Tampered


def trio(task: Task, llm: LLM) -> float:
    """Asks the writer, the editor and the judge, and is graded by the length of what the first two said."""
    said = {}
    for name in ("writer", "editor", "judge"):
        body = {"model": name, "messages": [{"role": "user", "content": f"{name}: {task.input}"}]}
        headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            said[name] = json.load(reply)["choices"][0]["message"]["content"]
    return float("yes" in said["writer"]) + float("yes" in said["editor"]) / 2


@pytest.fixture
def run(train: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`run(out, steps, ...)`: a run of the trio with the policies writer, editor and judge, which is not trained."""
    monkeypatch.setattr("tests.core.trainer.test_tiny_run.agent", trio)
    return lambda out, steps, **more: train(out, steps, **{**POLICIES, **more})


def findings(folder: Path, **changes: Any) -> set[str]:
    """The problems that an audit finds in a run, with these changes of what its store says."""
    found = asked(folder, lambda store: audit(Tampered(store, **changes), folder.name))  # type: ignore[arg-type]
    return {finding.problem for finding in found.findings}


def changed(by: str, **change: Any) -> dict[str, Any]:
    """A change of the recorded versions of all calls that this policy answered."""

    def one(call: Transition) -> Transition:
        return replace(call, versions=tuple(replace(run, **change) for run in call.versions))

    return {"calls": lambda calls: [one(call) if call.policy == by else call for call in calls]}


def test_a_run_is_as_it_was_trained_and_a_call_of_another_policy_is_found(run: Any) -> None:
    folder = run("mine", 2)
    assert not findings(folder), "an untrained policy has version 0 after each step, and is not too old"
    other = "its stored ids, logprobs, reward, versions or policies are not the trained ones"
    unknown = "answered by the policy 'ghost', which the run does not have (it has writer, editor, judge, base)"
    for change, own in (
        (
            changed("judge", version=7),
            "a call of trio: its version 7 of 'judge' cannot be: this policy is never trained",
        ),
        (changed("writer", policy="ghost"), f"a call of trio is {unknown}"),
        (changed("editor", policy="writer"), "its training rows are not the ones the engine computed on"),
    ):
        assert {other, own} <= findings(folder, **change)
    with closing(sqlite3.connect(folder / "lightning.db")) as database, database:
        said = "UPDATE transitions SET versions = replace(versions, 'editor', 'writer')"
        database.execute(f"{said} WHERE rollout = (SELECT n FROM rollouts WHERE trained_at_step = 2 LIMIT 1)")
    assert any("cannot be read" in problem for problem in findings(folder))


def test_each_step_is_equal_also_after_a_change_of_one_policys_rate_and_turns(run: Any) -> None:
    folder = run("mine", 2, trainer__policy_turns="writer:1,editor:1", policies__editor__lr=2e-3)
    kept = state(folder / "checkpoints/step-00000002/editor")
    shutil.rmtree(folder / "checkpoints/step-00000002")  # as a kill leaves a run that saves less often
    run("mine", 4, resume=True, trainer__policy_turns="writer:3,editor:1", policies__editor__lr=5e-3)
    assert [record.context.get("resting") for record in steps_of(folder)] == [["editor"], ["writer"]] * 2
    assert equal(kept, state(folder / "checkpoints/step-00000003/editor")), "step 2 had its own rate, and step 3 a rest"
    assert retrained(folder) == Retraining("mine", 4, 4, equal=True)

    file = folder / "checkpoints/step-00000004/editor/weights.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 0.5
    save_file(tensors, file)
    assert "the weights of editor after it are others than in its checkpoint, by up to 0.5" in str(retrained(folder))


def test_branches_are_answered_by_all_policies_of_the_step(run: Any, tmp_path: Path) -> None:
    folder = run("runs/mine", 2)
    how: dict[str, Any] = {"n": 2, "runs": str(tmp_path / "runs"), "runner": "inline"}

    def answered(report: BranchReport) -> set[tuple[str, int]]:
        assert report.valid == 2, report
        calls = asked(folder, lambda store: store.transitions_of([(each.id, 1) for each in report.branches]))
        return {(call.policy, call.versions[0].version) for own in calls for call in own}

    first = branch("mine/2/0/1", trio, at=2, **how)
    assert answered(first) == {("editor", 1), ("judge", 0)}
    assert first.model == f"mine@1 of {folder}"
    (made,) = (folder / "branches/models").glob(f"mine@1-*/{ADAPTERS_OF_ALL}")
    assert hash_weights(made) == steps_of(folder)[1].context["weights"], "bit for bit the adapters that vLLM had"
    assert answered(branch("mine/2/0/1", trio, at=3, **how)) == {("judge", 0)}
    assert len([*(folder / "branches/models").glob(f"*/{ADAPTERS_OF_ALL}")]) == 1, (
        "the judge is answered beside the same weights"
    )
    assert answered(branch("mine/2/0/1", trio, at=2, weights="mine/model/writer@1", **how)) == {(POLICY, 0)}


def test_each_policy_is_seen_by_its_name(run: Any, tmp_path: Path, capsys: Any) -> None:
    folder = run("runs/mine", 2, trainer__policy_turns="writer:1,editor:1", policies__editor__lr=2e-3)
    with pytest.raises(SystemExit):
        main(["runs", "show", str(folder)])
    said = capsys.readouterr().out
    assert "policy editor: answers model:editor; trained with a learning rate of 0.002 and adapters of rank 2\n" in said
    assert "policy judge: answers model:judge; not trained\n" in said
    assert re.search(r"policies that rested\n1 .* v1 +editor\n2 .* v2 +writer\n", said)

    async def tables(address: str, title: str) -> list[dict[str, str]]:
        places = Places(str(tmp_path / "runs"))
        try:
            blocks = (await show(places, address)).to_json()["blocks"]
        finally:
            await places.close()
        (table,) = [block["value"] for block in blocks if block["title"] == title]
        names = [column["name"] for column in table["columns"]]
        return [dict(zip(names, (cell["text"] for cell in row), strict=True)) for row in table["rows"]]

    writer, editor, judge = asyncio.run(tables("step/mine/2", "Policies"))
    assert writer["agents and training"].endswith("of rank 2; it rested in this step")
    assert (writer["gradient share"], editor["gradient share"], judge["gradient share"]) == ("–", "100 %", "–")
    assert [row["policy"] for row in asyncio.run(tables("run/mine", "Policies"))] == ["writer", "editor", "judge"]
    calls = asyncio.run(tables("rollout/mine/mine%2F2%2F0%2F0", "Calls"))
    assert [call["policy"] for call in calls] == ["writer 1", "editor 1", "judge 0"]
