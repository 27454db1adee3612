"""What a dry run complains about."""

from __future__ import annotations

from lightning.trainer.dev import DevRow, _hints, _problems


def row(**seen: object) -> DevRow:
    fields = {"task": "t", "reward": 1.0, "error": "", "seconds": 1.0, "agents": {"writer": 2}, "tools": {}}
    counts = {"trained_calls": 2, "prompt_tokens": 9, "response_tokens": 9, "calls_without_logprobs": 0}
    return DevRow(**{**fields, **counts, **seen})


def test_a_failed_adapter_is_a_problem_and_is_named_once() -> None:
    assert _problems([row()], ["*"]) == []
    (problem,) = _problems([row(failed_adapters=("acme",)), row(failed_adapters=("acme",))], ["*"])
    assert problem.startswith("the adapter acme failed")


def test_calls_under_a_mask_are_hinted_at_and_stop_nothing() -> None:
    assert _hints([row()]) == []
    (hint,) = _hints([row(constrained_calls=2), row()])
    assert hint.startswith("2 of 4 trained calls were sampled under a mask")
    assert _problems([row(constrained_calls=2)], ["*"]) == []
