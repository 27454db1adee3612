"""The page of what a step pushed most: its calls with their answers, tokens where they differ, and what is not known."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.batch import Sample, TokenSpan, Trajectory
from lightning.store.memory import MemoryStore
from lightning.types import Rollout, Run, Status, StepRecord, Task, Transition
from lightning_console.answers import answer
from lightning_console.export import links_of
from lightning_console.pages.pushed import PushedCall, Siblings, _strongest, pushed_of
from lightning_console.places import Located
from lightning_console.queries import steps
from lightning_console.queries.steps import CallCredit
from lightning_console.router import show
from lightning_record import exchanges

from tests.plugins.console import made_rollouts
from tests.plugins.console.made_rollouts import call, tokenizer, train
from tests.plugins.console.reading import places_of, shown, texts


async def test_the_calls_that_were_pushed_most_stand_with_their_answers(store: MemoryStore, tmp_path: Path) -> None:
    await train(store, str(tokenizer(tmp_path / "model")))
    found = await shown(places_of(store), "pushed/run/1")
    (up,) = texts(found["Pushed up most"])
    (down,) = texts(found["Pushed down most"])
    assert (up["call"], up["agent"], up["answer"], up["reward"]) == (
        "1/0/0, call 1",
        "solver",
        "word10 word11",
        "1.000",
    )
    assert (down["call"], down["answer"], down["reward"]) == ("1/0/2, call 1", "word12 word13", "0.000")
    assert float(up["advantage"]) == -float(down["advantage"]) > 0
    assert (up["share"], down["share"]) == ("50 %", "50 %"), (
        "the middle one has no advantage, the other group none at all"
    )
    said = [notice["text"] for notice in found["Notices"]["notices"]]
    assert "GRPO gives every token of a call the same push: calls are listed, not tokens" in said
    assert "Tokens pushed most" not in found
    hardest, up_most = found["In short"]["notices"]
    assert hardest["text"] == "Pushed down hardest: 1/0/2, call 1 by solver, 'word12 word13'"
    assert hardest["detail"].startswith(
        "Its rollout alone earned 0.000, the 2 others 0.750 on average. 1 of 3 rollouts made this call. "
        "Task (expected 0): question 0 "
    )
    assert up_most["text"].startswith("Pushed up hardest: 1/0/0, call 1 by solver, 'word10 word11'")
    (cell, *_) = found["Pushed up most"]["rows"][0]
    assert cell["to"] == "rollout/run/run%2F1%2F0%2F0?call=1"


async def test_answers_that_begin_alike_are_not_the_same_call(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_console.pages.pushed.LONGEST", 5)
    await train(store, str(tokenizer(tmp_path / "model")))
    hardest, _ = (await shown(places_of(store), "pushed/run/1"))["In short"]["notices"]
    assert "'word…'" in hardest["text"]
    assert "1 of 3 rollouts made this call." in hardest["detail"]


def test_the_reason_why_a_call_was_pushed_hardest_is_said_at_once() -> None:
    rollout = Rollout("run/5/3/7", "run", Task("91 + 18 + 87?", expected="196"), "run/5/3", 5, reward=0.0)
    beside = Siblings(8, 8, 7, 1.0, alone=True, calls=2, longest=True, part=2, own="It is 109", best="109 + 87")
    one = PushedCall(rollout, 1, 0, CallCredit(-2.5, 0.1, 15), "reader", 1, "91 + 18", siblings=beside)
    found = Located("run", Run("run", "run", {}), MemoryStore(), "memory://")
    said = _strongest(found, replace(one, rollout=replace(rollout, status=Status.SUCCEEDED)), "down", by_rollout=True)
    assert said.text == (
        "Pushed down hardest: 5/3/7, call 1 by reader, '91 + 18'. The mistake is in call 2: 'It is 109'; the best of its "
        "group said '109 + 87'"
    )
    assert said.detail == (
        "All calls of 5/3/7 were pushed down alike, since it alone earned 0.000, the 7 others 1.000 on average. Call 1 is "
        "first because it is the longest (15 tokens). Task (expected 196): 91 + 18 + 87?"
    )


async def test_it_is_linked_from_run_and_step_and_told_to_programs(store: MemoryStore) -> None:
    await train(store)
    places = places_of(store)
    for address in ("run/run", "step/run/1"):
        assert "pushed/run/1" in set(links_of((await show(places, address)).to_json()))
    told = await answer(places, "pushed/run/1", "Pushed up most")
    assert told["blocks"][0]["rows"][0][0]["to"].startswith("rollout/")


async def test_tokens_are_listed_where_their_pushes_differ(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = steps._calls

    def uneven(*given: Any) -> Any:
        return {seq: replace(each, pushes=(0.1, -0.4)) for seq, each in calls(*given).items()}

    monkeypatch.setattr(steps, "_calls", uneven)
    await train(store, str(tokenizer(tmp_path / "model")))
    found = await shown(places_of(store), "pushed/run/1")
    first = texts(found["Tokens pushed most"])[0]
    assert (first["token"], first["push"]) == ("'word11'", "-4.00e-01")
    assert first["in its answer"] == "word10[word11]"
    assert not any("same push" in notice["text"] for notice in found["Notices"]["notices"])


def test_the_push_of_each_token_is_kept_where_tokens_differ() -> None:
    rollout = Rollout("r", "run", Task("q"), "g")
    member = Trajectory(rollout, (call(rollout, 0, "a", [1], (5, 6, 7)),), (True,))
    weights, advantages = np.array([0, 0.5, 0.5, 0], np.float32), np.array([np.nan, 1, -2, np.nan], np.float32)
    ids, nothing, span = np.arange(4, dtype=np.int32), np.zeros(4, np.float32), TokenSpan("r", 1, 0, 1, 4)
    sample = Sample(ids, weights, advantages, nothing, ids, (span,))
    uneven = steps._calls(member, {0: (sample, span)})[0]
    assert uneven.pushes == (0.5, -1.0, 0.0)
    assert uneven.whole == -0.5
    even = replace(sample, weights=nothing + 0.5, advantages=nothing + 2)
    alike = steps._calls(member, {0: (even, span)})[0]
    assert (alike.pushes, alike.whole) == ((), 3.0)


async def test_what_is_kept_of_a_step_is_small(store: MemoryStore, tmp_path: Path) -> None:
    await train(store, str(tokenizer(tmp_path / "model")))
    places = places_of(store)
    found = await places.find("run")
    (record,) = await store.steps("run", limit=1)
    kept = await pushed_of(found, record, None)
    assert kept is not None
    assert [each.agent for each in (*kept.up, *kept.down)] == ["solver", "solver"]
    assert not kept.proof.members
    assert len(pickle.dumps((kept.up, kept.down, kept.tokens))) < 4_000, "no recorded call is kept with it"


async def test_what_is_not_known_is_said(store: MemoryStore) -> None:
    await train(store, own_code=True)
    own = await shown(places_of(store), "pushed/run/1")
    assert own["Notices"]["notices"][0]["text"] == "What this step pushed is not known"
    assert "the user's own code" in own["Notices"]["notices"][0]["detail"]
    assert "Pushed up most" not in own
    missing = await shown(places_of(store), "pushed/run/2")
    assert "no committed step 2" in missing["Notices"]["notices"][0]["text"]
    await store.put_run(Run("lost", "lost", {}))
    await store.commit_step(StepRecord("lost", 1, 1, (), (), "d"))
    nothing = await shown(places_of(store), "pushed/lost/1")
    assert nothing["Notices"]["notices"], "a step without a rollout says so"
    assert "Pushed up most" not in nothing


async def test_a_redacted_answer_is_shown_as_it_is_stored_and_said_to_be_so(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = b'{"choices": [{"message": {"role": "assistant", "content": "the key is [redacted]"}}]}'
    packed = exchanges.pack("/chat/completions", 200, b'{"messages":[]}', reply, flags=exchanges.Flag.REDACTED)
    made = made_rollouts.call

    def redacted(*given: Any) -> Transition:
        return replace(made(*given), extras={exchanges.TEXTS: packed})

    monkeypatch.setattr(made_rollouts, "call", redacted)
    await train(store)
    found = (await show(places_of(store), "pushed/run/1")).to_json()["blocks"]
    (table,) = [each for each in found if each["title"] == "Pushed up most"]
    assert table["value"]["rows"][0][2]["text"] == "the key is [redacted]"
    assert table["note"] == "some answers are not as they were sent: a credential was left out of its texts"
