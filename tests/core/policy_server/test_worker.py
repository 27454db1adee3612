"""The worker extension against small stand-ins for vLLM's worker; the real one is in test_vllm.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.policy_server.gathering import AT_ONCE, Gathering
from lightning.policy_server.launch import PARTS
from lightning.policy_server.worker import WorkerExtension, _forgotten, replace_weights


class Worker:
    """As vLLM makes it: the extension is appended behind the worker's own class."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner
        self.executed: list[object] = []

    def execute_model(self, scheduler_output: object) -> str:
        self.executed.append(scheduler_output)
        for request_id in getattr(scheduler_output, "finished_req_ids", ()):
            self.model_runner.requests.pop(request_id, None)
        return "output"


class Extended(Worker, WorkerExtension):
    pass


def v1(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(requests={rid: SimpleNamespace(output_token_ids=[0] * n) for rid, n in counts.items()})


def step(finished: set[str] = frozenset(), preempted: set[str] | None = None) -> Any:  # type: ignore[assignment]
    return SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted)


def test_attach_starts_at_version_zero_and_keeps_what_it_has() -> None:
    worker = Extended(v1())
    assert worker.lightning_attach()["version"] == 0
    assert worker.lightning_set_version("", "5") == {"version": 5}
    assert worker.lightning_attach()["version"] == 5


def test_parts_of_plugins_are_made_once_and_one_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(sys.modules[__name__], "part", made.append, raising=False)
    monkeypatch.setenv(PARTS, f"{__name__}:part,{__name__}:part")
    worker = Extended(v1())
    assert worker.lightning_attach()["version"] == 0
    worker.lightning_attach()
    assert made == [worker.model_runner] * 2
    monkeypatch.setenv(PARTS, "lightning.nowhere:part")
    assert "No module named 'lightning.nowhere'" in str(Extended(v1()).lightning_attach()["error"])


def test_the_last_claim_is_told_and_no_update_forgets_it() -> None:
    worker = Extended(v1())
    assert worker.lightning_attach()["claim"] == ""
    worker.lightning_claim("first")
    worker.lightning_claim("second")
    worker.lightning_set_version("second", "5")
    assert worker.lightning_attach()["claim"] == "second"


def test_weights_are_taken_from_the_last_claim_alone() -> None:
    worker = Extended(v1())
    worker.lightning_claim("first")
    worker.lightning_set_version("first", "5")
    assert worker.lightning_claim("second") == {"version": 5, "before": "first"}
    for claim in ("first", ""):
        assert worker.lightning_load(claim, "/nowhere") == {"owner": "second"}
        assert worker.lightning_set_version(claim, "6") == {"owner": "second"}
    assert worker.lightning_attach()["version"] == 5, "nothing was begun"


def test_a_claim_over_others_is_refused_where_another_one_is() -> None:
    worker = Extended(v1())
    assert worker.lightning_claim("first", "lost") == {"version": 0, "before": ""}
    assert worker.lightning_claim("second", "lost") == {"owner": "first"}
    assert worker.lightning_claim("", "lost") == {"owner": "first"}
    assert worker.lightning_claim("", "first") == {"version": 0, "before": "first"}
    assert worker.lightning_attach()["claim"] == ""


def test_a_step_waits_for_more_requests_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, seen = Extended(v1(a=1)), list[tuple[int, int]]()
    monkeypatch.setenv(AT_ONCE, "32")
    monkeypatch.setattr(Gathering, "wait", lambda _, running: seen.append((running, len(worker.executed))))
    worker.lightning_attach()
    scheduled = SimpleNamespace(**vars(step()), num_scheduled_tokens={"a": 1, "b": 7})
    assert worker.execute_model(scheduled) == "output"
    assert worker.executed == [scheduled]
    assert seen == [(2, 0)]


def test_in_flight_counts_what_runs_and_what_has_left() -> None:
    worker = Extended(v1(a=3, b=0, c=9))
    worker.lightning_attach()
    worker.lightning_attach()
    assert worker.execute_model(step({"c"})) == "output"
    assert len(worker.executed) == 1
    assert worker.lightning_in_flight()["counts"] == {"a": 3, "b": 0, "c": 9}
    worker.lightning_set_version("", "1")
    assert worker.lightning_in_flight()["counts"] == {"a": 3, "b": 0}


def test_a_preempted_request_that_goes_on_counts_what_it_has_now() -> None:
    worker = Extended(v1(a=3))
    worker.lightning_attach()
    worker.execute_model(step(preempted={"a"}))
    worker.model_runner.requests["a"].output_token_ids.append(0)
    assert worker.lightning_in_flight()["counts"] == {"a": 4}


def test_what_requests_need_is_counted() -> None:
    worker = Extended(v1(a=3))
    names = ("requests", "prompt_tokens", "cached_tokens", "preemptions")
    assert [worker.lightning_attach()[name] for name in names] == [0, 0, 0, 0]
    begun = [SimpleNamespace(prompt_token_ids=[1] * 70, num_computed_tokens=cached) for cached in (0, 64)]
    worker.execute_model(SimpleNamespace(scheduled_new_reqs=begun, finished_req_ids=set(), preempted_req_ids=None))
    worker.execute_model(step(preempted={"a"}))
    assert [worker.lightning_attach()[name] for name in names] == [2, 140, 64, 1]


def test_only_the_last_departures_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerExtension, "_LIGHTNING_REMEMBERED", 2)
    worker = Extended(v1(a=1, b=2, c=3))
    worker.lightning_attach()
    for name in "abc":
        worker.execute_model(step({name}))
    assert worker.lightning_in_flight()["counts"] == {"b": 2, "c": 3}


def test_the_v2_runners_rows_are_read() -> None:
    states = SimpleNamespace(
        req_id_to_index={"a": 1}, total_len=SimpleNamespace(gpu=[0, 25]), prompt_len=SimpleNamespace(np=[0, 20])
    )
    worker = Extended(SimpleNamespace(req_states=states))
    worker.lightning_attach()
    assert worker.lightning_in_flight()["counts"] == {"a": 5}


def test_errors_are_answers_not_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", None)  # the real one takes seconds to import; test_vllm.py has it
    worker = Extended(SimpleNamespace())
    worker.lightning_attach()
    assert "does not know the request states" in str(worker.lightning_in_flight()["error"])
    assert "error" in worker.lightning_load("", "/nowhere")
    assert worker.lightning_attach()["version"] is None


@pytest.mark.parametrize(("setting", "randomized"), [(None, True), ("0", True), ("1", False)])
def test_whether_ids_carry_vllms_digits(monkeypatch: pytest.MonkeyPatch, setting: str | None, randomized: bool) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", setting)
    worker = Extended(v1())
    worker.lightning_attach()
    assert worker.lightning_in_flight()["randomized"] is randomized


def test_every_public_name_has_the_prefix() -> None:
    assert all(name.lstrip("_").lower().startswith("lightning_") for name in dir(WorkerExtension) if name[:2] != "__")


@pytest.fixture
def reload_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's, where a model's parameters are what they are."""
    helpers = SimpleNamespace(
        initialize_layerwise_reload=lambda model: None, finalize_layerwise_reload=lambda model, config: None
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", helpers)


class Served(torch.nn.Module):
    """Loads what it has a parameter for, and tells their names, as vLLM's models do."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        for name, value in weights:
            if name in own:
                own[name].copy_(value)
                loaded.add(name)
        return loaded


def load(model: Served, *names: str) -> None:
    cpu = torch.device("cpu")
    replace_weights(model, None, cpu, ((name, torch.zeros_like(model.get_parameter(name))) for name in names))


@pytest.mark.usefixtures("reload_helpers")
def test_a_part_for_which_nothing_came_keeps_its_weights_and_others_must_be_whole() -> None:
    model = Served("language_model", "visual", "lm_head")
    before = model.visual.weight.clone()
    text = ["language_model.weight", "language_model.bias"]
    head = ["lm_head.weight", "lm_head.bias"]
    load(model, *text, *head)
    assert torch.equal(model.visual.weight, before)
    assert not model.language_model.weight.any()
    with pytest.raises(RuntimeError, match=r"there are no weights for language_model\.bias \(1 parameters in all\)"):
        load(model, text[0], *head)
    with pytest.raises(RuntimeError, match=r"there are no weights for lm_head\.bias, lm_head\.weight"):
        load(model, *text)
    with pytest.raises(RuntimeError, match="there are no weights for"):
        load(model)


def test_experts_are_told_by_their_layers_name_and_what_is_missing_is_found() -> None:
    experts, missing = "model.0.experts.routed_experts.w13_weight", "model.0.experts.routed_experts.w2_weight"
    loaded = {"model.0.norm.weight", "model.0.experts.w13_weight"}
    assert _forgotten({"model.0.norm.weight", experts, missing, "vision.weight"}, loaded) == [missing]
