"""Whether the agent went on with a compaction, and what becomes of the call then."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import openai
import pytest
from lightning.batch import Trajectory, build_samples
from lightning.testing import RolloutRecord, rollout
from lightning.testing.trajectories import make_call
from lightning.trainer.training_data import is_of_interest
from lightning.types import LLM, Task, Transition
from lightning_harnesses.verdicts import verdicts

SUMMARY = tuple(range(500, 540))
HISTORY = tuple(range(100, 160))


def at(seq: int, prompt: Any, response: Any, agent: str = "agent") -> Transition:
    return replace(make_call(prompt, response, seq=seq, agent=agent), started_at=seq, ended_at=seq + 0.5)


COMPACTION = at(1, HISTORY, (*SUMMARY, 2))
CASES = [
    ("the next prompt has the summary", [at(2, (1, *SUMMARY, 7), (8,))], True),
    ("it has the half that the program kept", [at(2, (1, *SUMMARY[20:], 7), (8,))], True),
    ("another agent has it", [at(2, (1, *SUMMARY, 7), (8,), "other")], True),
    ("the agent went on with its history", [at(2, (*HISTORY, 7), (8,))], False),
    ("a few words are the same", [at(2, (*HISTORY, *SUMMARY[:9]), (8,))], False),
    ("it wrote the same itself", [at(2, HISTORY, SUMMARY), at(3, (*HISTORY, *SUMMARY), (8,))], False),
    ("only another agent went on", [at(2, (1, 2, 3), (8,), "other")], None),
    ("nothing followed", [], None),
]


@pytest.mark.parametrize(("what", "later", "verdict"), CASES, ids=[case[0] for case in CASES])
def test_what_became_of_an_answer(what: str, later: list[Transition], verdict: bool | None) -> None:
    assert verdicts([COMPACTION, *later], {COMPACTION.id: "compaction"}).get(COMPACTION.id) is verdict


def test_a_second_try_shows_that_the_first_was_rejected_even_if_its_prompt_quotes_it() -> None:
    better = (*SUMMARY[:25], *range(600, 640))
    again = at(2, (*HISTORY, *SUMMARY, 9), (*better, 2))
    after = at(3, (1, *better), (8,))
    found = verdicts([COMPACTION, again, after], {COMPACTION.id: "compaction", again.id: "compaction"})
    assert found == {COMPACTION.id: False, again.id: True}


def test_an_answer_that_is_too_short_or_repeats_its_prompt_is_neither() -> None:
    for answer in ((7, 2), (*HISTORY[:20], 2)):
        asked = at(1, HISTORY, answer)
        assert verdicts([asked, at(2, (1, 2, 3), (8,))], {asked.id: "compaction"}) == {}


REASONING = tuple(range(2000, 3600))
LONG_SUMMARY = tuple(range(4000, 4400))


@pytest.mark.parametrize(
    ("kept", "verdict"), [(LONG_SUMMARY, True), (LONG_SUMMARY[:40], True), (REASONING[:12], False)]
)
def test_reasoning_that_no_prompt_has_does_not_make_a_summary_a_rejected_one(
    kept: tuple[int, ...], verdict: bool
) -> None:
    asked = at(1, HISTORY, (*REASONING, *LONG_SUMMARY, 2))
    assert verdicts([asked, at(2, (1, *kept, 7), (8,))], {asked.id: "compaction"}) == {asked.id: verdict}


def test_many_calls_of_a_rule_are_judged_in_a_moment() -> None:
    """Comparing each with each took 11 s. The bound is 20 times what it takes."""
    values = np.random.default_rng(0).integers(0, 50_000, (400, 300))
    calls = [at(seq, HISTORY, row) for seq, row in enumerate(values.tolist())]
    last = at(401, (1, *values[-1]), (8,))
    before = time.process_time()
    found = verdicts([*calls, last], {call.id: "notes" for call in calls})
    assert time.process_time() - before < 2
    assert [found[call.id] for call in calls] == [False] * 399 + [True]


ASK = "Your task is to create a detailed summary of the conversation so far."
LONG = "the numbers one two three four five six seven eight nine ten were all added and only zero is left"


def agent(task: Task, llm: LLM) -> float:
    """Ask for a summary until one has the word that the task asks for, and go on with that."""
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)

    def ask(*texts: str) -> str:
        messages: Any = [{"role": "user", "content": text} for text in texts]
        return client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content or ""

    ask("begin")
    while task.input not in (summary := ask("begin", ASK)):
        pass
    ask(f"So far: {summary}", "go on")
    return 1.0


def trained(record: RolloutRecord) -> int:
    calls = record.transitions
    flags = tuple(is_of_interest(call, ()) for call in calls)
    rows = build_samples([Trajectory(record.rollout, calls, flags)], [[1.0] * len(calls)])
    return sum(int((row.weights != 0).sum()) for row in rows)


def test_a_rejected_compaction_of_a_known_request_is_not_trained_and_the_accepted_one_is() -> None:
    record = rollout(agent, "zero", ["so", f"no: {LONG.replace('zero', 'nought')}", LONG, "done"])
    assert [call.untrained for call in record.transitions] == ["", "compaction, rejected", "", ""]
    assert trained(record) == sum(len(call.response_ids) for call in record.transitions if not call.untrained)


NODE = """
const {OPENAI_BASE_URL: base, OPENAI_API_KEY: key, OPENAI_MODEL: model} = process.env;
const ask = async (content, marks = {}) => {
  const reply = await fetch(`${base}/chat/completions`, {
    method: "POST",
    headers: {"content-type": "application/json", authorization: `Bearer ${key}`, ...marks},
    body: JSON.stringify({model, messages: [{role: "user", content}]}),
  });
  return (await reply.json()).id;
};
await ask("Name this", {"x-lightning-untrained": "title"});
const first = await ask("Summarize");
await ask("Summarize", {"x-lightning-rejected": `${first} summary, rejected`});
await ask("go on");
"""


@pytest.mark.skipif(__import__("shutil").which("node") is None, reason="no node here")
def test_a_program_says_it_by_headers() -> None:
    script = NODE.replace("{", "{{").replace("}", "}}")
    record = rollout(lightning.command(["node", "--input-type=module", "-e", script]), "x", ["a b", "c", "d e f", "g"])
    assert [call.untrained for call in record.transitions] == ["title", "summary, rejected", "", ""]
    assert trained(record) == sum(len(call.response_ids) for call in record.transitions if not call.untrained)
