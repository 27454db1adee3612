"""A changed grader is tried on what a run has recorded: what it would have changed, and what is suspicious of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from lightning import LightningRL
from lightning.batch import Group, Trajectory
from lightning.cli.app import main
from lightning.cli.output import locate, with_store
from lightning.errors import ConfigError
from lightning.testing import Reply, ToolCall, rollout
from lightning.trainer.context import Epoch
from lightning.trainer.runs import describe_algorithm
from lightning.types import Fault, Rollout, Status, StepRecord, Task, Transition, logprobs, token_ids
from lightning_debug import transcript
from lightning_debug.regrade import RewardTrial, _Trial, explained_by, rank_correlation, try_grader
from lightning_debug.run_commands import show_trial
from lightning_debug.transcript import Transcript, text_of, tool_calls_of, transcript_of
from lightning_record import exchanges
from lightning_record.exchanges import TEXTS

from tests.core.trainer.test_tiny_run import train as train

GRADERS = """
def longer(seen):
    return float(len(seen.answer))

def same(seen):
    return seen.rollout.reward

def backwards(seen):
    return {"right": -seen.rollout.reward, "length": 0.0}

def broken(seen):
    raise ValueError(f"no answer in {seen.rollout.id[-1]}")

class Even:
    # judges a group, and cannot be called
    weight = 1.0

    def judge(self, groups):
        from lightning_debug.judge import Judgement
        return [Judgement(tuple(0.0 for _ in group), 1.0) for group in groups]

even = Even()
number = 3
"""


def tried(folder: Path, grader: Any) -> RewardTrial:
    url, run = locate(str(folder), folder.parent)
    return asyncio.run(with_store(url, lambda store: try_grader(store, run, grader)))


def varied(number: int) -> float:
    return float(number % 3)


@pytest.fixture
def folder(train: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps with rewards that differ inside each group."""
    from tests.core.trainer import test_tiny_run

    original: Any = test_tiny_run.agent
    ended: list[int] = []

    def agent(task: Any, llm: Any) -> float:
        original(task, llm)
        ended.append(1)
        return varied(len(ended))

    monkeypatch.setattr(test_tiny_run, "agent", agent)
    made: Path = train("run", 2)
    return made


def test_the_recorded_rewards_change_nothing(folder: Path) -> None:
    trial = tried(folder, lambda seen: seen.rollout.reward)
    assert trial.same
    assert (trial.groups, len(trial.rollouts), trial.reordered) == (4, 16, ())
    assert trial.rank_correlation == pytest.approx(1.0)
    assert trial.advantages is not None
    assert trial.advantages[0] > 0
    assert trial.advantages[1:] == (0, 0)
    assert trial.warnings == ()


def test_the_order_turned_round_turns_every_advantage(folder: Path) -> None:
    trial = tried(folder, lambda seen: {"right": -seen.rollout.reward})
    assert not trial.same
    assert trial.rank_correlation == pytest.approx(-1.0)
    assert len(trial.reordered) == 4
    assert trial.advantages is not None
    trained, other, signs = trial.advantages
    assert signs == other == trained == len(trial.changed_calls) > 0
    for *_, before, now in trial.changed_calls:
        assert now == pytest.approx(-before, abs=1e-4)


def group_of(lengths: list[int], rewards: list[float]) -> tuple[Group, dict[str, list[Transition]]]:
    """A group whose rollouts have one answer each, of so many tokens, and their calls."""
    members, calls = [], {}
    for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        made = Rollout(
            f"r{index}", "run", Task("t"), "g", index=index, attempt=1, reward=reward, status=Status.SUCCEEDED
        )
        packed = exchanges.pack(
            "/chat/completions", 200, b'{"messages":[]}', b'{"choices":[{"message":{"content":"x"}}]}'
        )
        ids, values = token_ids([5] * length), logprobs([-1.0] * length)
        call = Transition(
            made.id, 1, 0, f"c{index}", token_ids([1]), ids, values, finish_reason="stop", extras={TEXTS: packed}
        )
        members.append(Trajectory(made, (call,), (True,)))
        calls[made.id] = [call]
    return Group("g", tuple(members)), calls


RECORD, GRPO = (
    StepRecord("run", 1, 1, (), (), ""),
    Epoch(0, 1, {"algorithm": describe_algorithm(LightningRL("grpo"))}, 0.0),
)


def trial_of(grader: Any, *groups: tuple[Group, dict[str, list[Transition]]]) -> RewardTrial:
    trial = _Trial(grader)
    for group, calls in groups:
        trial.step(RECORD, GRPO, [group], calls)
    return trial.result()


def test_a_grader_that_rewards_length_is_found() -> None:
    groups = [group_of(lengths, [1.0, 0.0, 0.0, 1.0]) for lengths in ([1, 20, 30, 40], [9, 2, 17, 33], [50, 5, 14, 3])]
    found = trial_of(lambda seen: {"right": seen.rollout.reward or 0.0, "style": float(seen.tokens)}, *groups)
    _, now = found.follows["the length of the answers (tokens)"]
    assert now is not None
    assert now > 0.9
    assert any(
        "the reward follows the length of the answers (tokens): rank correlation +" in said for said in found.warnings
    )
    assert any(said.startswith("the part style alone makes 9") for said in found.warnings)
    assert found.reordered == ("g", "g", "g")
    assert found.why == ""
    assert found.advantages is not None
    assert found.advantages[1] > 0


def test_a_grader_that_gives_everybody_the_same_is_not_the_same() -> None:
    found = trial_of(lambda seen: 1.0, group_of([1, 2, 3, 4], [1.0, 0.0, 0.0, 1.0]))
    assert not found.same
    assert (found.reordered, found.equal_before, found.equal_now, found.explained) == (("g",), 0.0, 1.0, {})
    tenths = trial_of(lambda seen: {"right": 0.1, "length": 0.0}, group_of([1, 2, 3], [0.0, 1.0, 1.0]))
    assert tenths.explained == {}, "rounding is no variance"


def test_a_trial_that_graded_nothing_says_nothing() -> None:
    found = trial_of(lambda seen: 1.0)
    assert (found.same, found.equal_before, found.equal_now, found.warnings) == (False, None, None, ())


def test_what_the_policy_failed_keeps_its_reward() -> None:
    group, calls = group_of([1, 2, 3], [0.0, 1.0, 1.0])
    first, *others = group.trajectories
    failed = replace(first, rollout=replace(first.rollout, status=Status.FAILED, fault=Fault.POLICY))

    def grade(seen: Transcript) -> float:
        assert seen.rollout.status is Status.SUCCEEDED
        return seen.rollout.reward or 0.0

    found = trial_of(grade, (replace(group, trajectories=(failed, *others)), calls))
    assert (found.kept, len(found.rollouts), found.same) == (1, 2, True)
    assert found.advantages is not None
    assert found.advantages[0] == 3, "its advantage counts"


def test_texts_that_are_not_recorded_are_not_graded_in_silence() -> None:
    group, calls = group_of([1, 2], [0.0, 1.0])
    calls["r0"] = [replace(calls["r0"][0], extras={})]
    calls["r1"] = []
    found = trial_of(lambda seen: float(len(seen.answer)), (group, calls))
    assert found.failed == {
        "DataError: its requests and answers are not recorded": 1,
        "DataError: no call of it is stored": 1,
    }
    assert not found.same


def test_a_call_that_failed_before_another_hides_no_rollout() -> None:
    def agent(task: Task, llm: Any) -> float:
        for _ in range(2):
            body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"authorization": f"Bearer {llm.api_key}"}
            reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
        return float(reply.is_success)

    record = rollout(agent, Task("t"), [Reply(status=500), "good"], adapters=())
    seen = transcript_of(record.rollout, record.transitions, record.tool_events)
    assert (seen.answer, len(seen.calls), seen.missing) == ("good", 1, "")


def test_a_grader_may_be_a_coroutine_or_run_a_loop_of_its_own(folder: Path) -> None:
    async def grade(seen: Transcript) -> float:
        await asyncio.sleep(0)
        return seen.rollout.reward or 0.0

    assert tried(folder, grade).same
    assert tried(folder, lambda seen: asyncio.run(grade(seen))).same


def test_lengths_that_differ_are_followed() -> None:
    lengths = np.array([3.0, 9.0, 4.0, 20.0, 11.0])
    assert rank_correlation(lengths, lengths * 2 + 1) == pytest.approx(1.0)
    assert rank_correlation(lengths, -lengths) == pytest.approx(-1.0)
    assert rank_correlation(lengths, np.zeros(5)) is None
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 9.0])) == pytest.approx(1.0)


@given(some.lists(some.tuples(some.floats(-9, 9), some.floats(-9, 9)), min_size=2, max_size=30))
def test_a_rank_correlation_is_symmetric_and_bounded(pairs: list[tuple[float, float]]) -> None:
    one, other = np.array(pairs).T
    found = rank_correlation(one, other)
    assert found is None or -1.0 - 1e-9 <= found <= 1.0 + 1e-9
    back = rank_correlation(other, one)
    assert (found is None) == (back is None)
    assert found is None or found == pytest.approx(back)


def test_what_a_grader_fails_on_is_counted_and_in_no_figure(folder: Path) -> None:
    def grade(seen: Transcript) -> float:
        if seen.rollout.index == 0:
            raise ValueError("no number")
        return 1.0

    trial = tried(folder, grade)
    assert not trial.same
    assert trial.failed == {"ValueError: no number": 4}
    assert len(trial.rollouts) == 12
    assert trial.equal_now == 1.0


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "graders_of_mine.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["reward", "try", *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    code, said = run("graders_of_mine:same", str(folder))
    assert code == 0
    assert "groups whose order changes: 0 of 4" in said
    code, said = run("graders_of_mine:backwards", str(folder))
    assert code == 1
    assert "groups whose order changes: 4 of 4" in said
    assert "rank correlation with the recorded rewards -1.000" in said
    code, said = run("graders_of_mine:broken", str(folder), "--json")
    assert code == 1
    assert sum(json.loads(said)["failed"].values()) == 16
    code, said = run("graders_of_mine:even", str(folder))
    assert code == 0
    assert "order alike: 100%" in said
    with pytest.raises(SystemExit):
        main(["reward", "try", "graders_of_mine:number", str(folder)])
    assert (
        "is a int: a grader is a function of a transcript, or has a weight and judge(groups)" in capsys.readouterr().err
    )


def test_a_run_that_is_not_there_is_said(folder: Path) -> None:
    url, _ = locate(str(folder), folder.parent)
    with pytest.raises(ConfigError, match="does not know the run other"):
        asyncio.run(with_store(url, lambda store: try_grader(store, "other", lambda seen: 1.0)))


def test_the_text_of_an_answer_in_each_api() -> None:
    assert text_of({"choices": [{"message": {"content": "chat"}}]}) == "chat"
    assert text_of({"choices": [{"text": "completion"}]}) == "completion"
    assert text_of({"content": [{"type": "thinking"}, {"type": "text", "text": "message"}]}) == "message"
    said = {"type": "message", "content": [{"type": "output_text", "text": "response"}]}
    assert text_of({"output": [{"type": "reasoning"}, said]}) == "response"
    assert text_of(None) == ""


SAID = [{"role": "user", "content": "Find it"}]
FUNCTION = {"name": "final_answer", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": SAID, "tools": [{"type": "function", "function": FUNCTION}]}),
        (
            "messages",
            {
                "messages": SAID,
                "max_tokens": 99,
                "tools": [{"name": "final_answer", "input_schema": {"type": "object"}}],
            },
        ),
        ("responses", {"input": "Find it", "tools": [{"type": "function", **FUNCTION}]}),
    ],
)
def test_an_answer_that_is_a_tool_call_is_in_the_transcript(path: str, body: dict[str, Any]) -> None:
    def agent(task: Task, llm: Any) -> float:
        headers = {"authorization": f"Bearer {llm.api_key}", "x-api-key": llm.api_key}
        reply = httpx.post(f"{llm.base_url}/{path}", json={"model": llm.model, **body}, headers=headers)
        assert reply.is_success, reply.text
        return 1.0

    record = rollout(agent, Task("t"), [ToolCall("final_answer", '{"answer": "42"}')], adapters=())
    seen = transcript_of(record.rollout, record.transitions, record.tool_events)
    (call,) = seen.calls
    assert call.tool_calls == (transcript.ToolCall("final_answer", {"answer": "42"}),)
    assert (seen.answer, seen.ending) == ("", 'final_answer({"answer": "42"})')


def test_the_tool_calls_of_an_answer_in_each_api() -> None:
    wanted = (transcript.ToolCall("add", {"a": 1}), transcript.ToolCall("note", "no JSON"))
    functions = [{"name": "add", "arguments": '{"a":1}'}, {"name": "note", "arguments": "no JSON"}]
    message = {"content": "Now", "tool_calls": [{"id": f"{one}", "function": one} for one in functions]}
    assert tool_calls_of({"choices": [{"message": message}]}) == wanted
    assert tool_calls_of({"choices": [{"text": "completion"}]}) == ()
    text, *parts = [
        {"type": "text", "text": "Now"},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "note", "input": "no JSON"},
    ]
    assert tool_calls_of({"type": "message", "role": "assistant", "content": [text, *parts]}) == wanted
    items = [{"type": "function_call", "call_id": "c", **one} for one in functions]
    reply = {"output": [{"type": "reasoning"}, {"type": "message", "content": []}, *items]}
    assert (tool_calls_of(reply), text_of(reply)) == (wanted, "")
    assert tool_calls_of(None) == ()


def test_what_cannot_be_said_is_not_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trial = _Trial(lambda seen: seen.rollout.reward)
    group, calls = group_of([1, 2, 3, 4], [1.0, 0.0, 0.0, 1.0])
    critic = Epoch(0, 1, {"algorithm": describe_algorithm(LightningRL("ppo", credit="critic"))}, 0.0)
    trial.step(RECORD, critic, [group], calls)
    found = trial.result()
    assert "follow from a critic" in found.why
    assert (found.reordered, found.failed, found.advantages) == ((), {}, None)
    assert not found.same
    show_trial(found, 0)
    assert "whether training would have been the same, cannot be said" in " ".join(capsys.readouterr().out.split())


def test_parts_that_add_up_explain_all_of_the_reward() -> None:
    class One:
        def __init__(self, **parts: float) -> None:
            self.parts = parts

    seen: Any = [One(a=1.0, b=0.0), One(a=0.0, b=0.2), One(a=1.0, b=0.1)]
    found = explained_by(seen, np.array([sum(one.parts.values()) for one in seen]))
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["a"] > 0.9
    weighted = np.array([0.2 * one.parts["a"] + 0.8 * place for place, one in enumerate(seen)])
    assert explained_by(seen, weighted) == {}, "the reward is not the sum of its parts"
