"""The search finds a text wherever it stands in a run, in any script, shares its address, and says what it did not look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.types import Fault, Run
from lightning_console.places import Places
from lightning_console.queries import scan, search
from lightning_console.queries.search import around, folded_of
from lightning_record.exchanges import Flag
from lightning_server.projects import Projects

from tests.plugins.console.made_rollouts import tokenizer, train
from tests.plugins.console.made_tools import MARKUP, one, write
from tests.plugins.console.reading import places_of, shown, texts, to

THAI, ARABIC, FLAG = "สวัสดีชาวโลก", "مرحبا بالعالم", "👩🏽‍🚀"
USER = {"role": "user", "content": f"{THAI} {ARABIC} {FLAG} İstanbul café"}


async def found(store: MemoryStore, run: str = "run", **options: object) -> dict[str, Any]:
    return await shown(places_of(store), to("search", run, **options))


def rows(blocks: dict[str, Any]) -> list[dict[str, str]]:
    table = next(value for title, value in blocks.items() if title.startswith("Rollouts"))
    return texts(table)


def notices(blocks: dict[str, Any]) -> str:
    return json.dumps(blocks.get("Notices", {}))


async def test_a_text_is_found_with_its_place_and_the_rewards_beside(store: MemoryStore) -> None:
    await write(store)
    blocks = await found(store, q="STRASSE IST 3")
    first = rows(blocks)[0]
    assert first == {
        "rollout": "1/0/3", "step": "1", "reward": "1.000", "found in": "answer of call 2",
        "text before": "Die", "found": "Straße ist 3", "text behind": "km lang",
    }  # fmt: skip
    table = blocks["Rollouts 1 to 8 of 8"]
    assert table["rows"][0][3]["to"] == to("rollout", "run", "run/1/0/3", call=2)
    facts = {fact["name"]: fact["value"] for fact in blocks["Facts"]["facts"]}
    assert facts["rollouts with it"] == "8"
    assert (facts["reward with it"], facts["reward without it"]) == ("1.000", "0.500")
    assert blocks["page"].address == to("search", "run", q="STRASSE IST 3"), "the address can be shared"
    assert not blocks["page"].live


@pytest.mark.parametrize(
    ("where", "text", "count"),
    [
        ("task", "task 3", 4),
        ("prompt", "divide, PLEASE", 32),
        ("answer", "km lang", 32),
        ("tool", '"by": 0', 16),
        ("tool", "a wall", 32),
        ("error", "division by zero", 16),
        ("error", "km lang", 0),
        ("", MARKUP, 32),
    ],
)
async def test_where_a_text_is_found_is_a_filter(store: MemoryStore, where: str, text: str, count: int) -> None:
    await write(store)
    blocks = await found(store, q=text, where=where)
    assert {fact["name"]: fact["value"] for fact in blocks["Facts"]["facts"]}["rollouts with it"] == str(count)
    assert all(row["found in"].startswith(where) for row in rows(blocks) if row["found"])


async def test_a_text_that_stands_in_several_kinds_is_found_in_each(store: MemoryStore) -> None:
    task, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "the answer"}
    await one(
        store,
        "run",
        [([task], answer, None), ([task, answer, task], {"content": "finished"}, None)],
        error="the answer",
    )
    assert [row["found in"] for row in rows(await found(store, q="one"))] == ["task", "prompt of call 1"]
    assert [row["found in"] for row in rows(await found(store, q="the answer"))] == ["error", "answer of call 1"]
    assert not rows(await found(store, q="the answer", where="prompt")), "an answer that comes back is no prompt"


async def test_rollouts_are_found_by_reward_step_and_failure_with_and_without_a_text(store: MemoryStore) -> None:
    await write(store)
    await one(store, "bad", [([USER], {"content": "x"}, None)], error="Traceback: it broke")
    assert "Rollouts 1 to 16 of 16" in await found(store, above=0.9)
    assert "Rollouts 1 to 8 of 8" in await found(store, below=0.25, step=2)
    assert "Rollouts 1 to 8 of 8" in await found(store, q="zero", below=0.25, step=2)
    assert "Rollouts" in await found(store, q="zero", above=0.9)
    assert [row["reward"] for row in rows(await found(store, "bad", failed="yes"))] == ["failed"]
    assert not rows(await found(store, "bad", failed="no"))
    await one(store, "unwanted", [([USER], {"content": "x"}, None)], error="enough", fault=Fault.CANCELLED)
    assert [len(rows(await found(store, "unwanted", step=1, failed=each))) for each in ("", "yes", "no")] == [1, 0, 0]
    assert not rows(await found(store, "bad", split="val"))
    await one(store, "long", [([USER], {"content": "and so on", "finish_reason": "length"}, None)])
    (cut,) = rows(await found(store, "long", cut="yes"))
    assert (cut["rollout"], cut["found in"], cut["answer"]) == ("1/0/0", "answer of call 1", "and so on")
    ended = (await shown(places_of(store), to("rollout", "long", "long/1/0/0")))["Facts"]["facts"][1]
    assert (ended["value"], ended["detail"]) == (
        "answer cut off at the limit of tokens",
        "call 1; no error of the agent",
    )
    broken = '<tool_call> {"name": "look", "arguments": {"q": beads"}} </tool_call>'
    await one(store, "odd", [([USER], {"content": broken}, None)])
    assert rows(await found(store, "odd", odd="yes"))[0]["answer"] == broken
    parts = (await found(store, q="zero"))["In short"]["notices"][0]["links"]
    assert [part["text"].split(" in ")[1] for part in parts] == ["training step 1", "training step 2"]
    assert parts[1]["to"] == to("search", "run", q="zero", split="train", step=2)
    said = (await found(store, q="zero", step=2))["In short"]["notices"][0]["text"]
    assert (
        said
        == "8 rollouts: 8 in training step 2. They earned 0.250 on average, the other rollouts of the same parts 1.000"
    )
    assert not rows(await found(store, "odd", odd="no"))
    assert not rows(await found(store, "long", cut="no"))
    assert not rows(await found(store, "bad", cut="yes"))
    assert rows(await found(store, "bad", q="it broke"))[0]["found in"] == "error"


async def test_a_long_list_goes_on(store: MemoryStore) -> None:
    await write(store)
    first = await found(store, q="km lang")
    assert first["page"].next == to("search", "run", q="km lang", cursor=25)
    second = await shown(places_of(store), first["page"].next)
    assert "Rollouts 26 to 32 of 32" in second
    assert second["page"].next == ""
    assert second["page"].previous == to("search", "run", q="km lang")


async def test_a_rollout_with_many_hits_shows_some_and_counts_the_others(store: MemoryStore) -> None:
    await one(store, "many", [([{"role": "user", "content": f"needle {n}"} for n in range(9)], {"content": "-"}, None)])
    found_in = [row["found in"] for row in rows(await found(store, "many", q="needle"))]
    assert found_in == ["prompt of call 1"] * 3 + ["and in 6 more texts of it"]


@pytest.mark.parametrize("text", [THAI[3:7], ARABIC[2:8], FLAG, "istanbul".replace("i", "i̇", 1), "cafe\u0301", "CAFÉ"])
async def test_every_script_is_found(store: MemoryStore, text: str) -> None:
    await one(store, "run", [([USER], {"content": "ok"}, None)])
    (row,) = rows(await found(store, q=text))
    assert folded_of(row["found"]) == folded_of(text)
    assert row["rollout"] == "1/0/0"


async def test_a_text_of_a_million_characters_is_searched_to_its_bound(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "LONGEST", 100_000)
    long = "word " * 19_998 + "needle and " + "word " * 1_000 + "behind"
    await one(store, "long", [([{"role": "user", "content": long}], {"content": "ok"}, None)])
    blocks = await found(store, "long", q="needle")
    (row,) = rows(blocks)
    assert (row["text before"][:6], row["found"]) == ("…word ", "needle")
    assert "of 1 text only the first" in notices(blocks)
    assert not rows(await found(store, "long", q="behind"))


async def test_a_run_without_texts_says_why_nothing_is_found(store: MemoryStore) -> None:
    await write(store, groups=1, flags=Flag.TOO_LARGE)
    said = notices(await found(store, q="km lang"))
    assert "8 calls are not searched whole: a request or an answer of it was too large" in said
    assert "this may be why nothing is found" in said


async def test_a_redacted_run_says_so(store: MemoryStore) -> None:
    await write(store, groups=1, flags=Flag.REDACTED)
    blocks = await found(store, q="sk-secret")
    assert "8 calls are not searched whole: a credential was left out of its texts" in notices(blocks)
    assert rows(await found(store, q="km lang")), "the rest of these texts is there"


async def test_answers_are_found_by_their_tokens_where_requests_are_not_recorded(
    store: MemoryStore, tmp_path: Path
) -> None:
    await train(store, str(tokenizer(tmp_path / "model")))
    await train(store, "gone", run="bare")
    blocks = await found(store, q="word20 word30")
    assert [row["found in"] for row in rows(blocks)] == ["answer of call 2", "answer of call 2"]
    assert "12 calls are not searched whole: its requests and answers are not recorded" in notices(blocks)
    assert not rows(await found(store, "bare", q="20")), "ids of tokens are no texts"


async def test_memory_is_bounded_and_the_page_says_so(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(store, groups=2)
    monkeypatch.setattr(scan, "MOST_BYTES", 1500)
    blocks = await found(store, q="km lang")
    assert "texts are left out" in notices(blocks)
    assert sum(each.bytes for each in scan._scans) <= 1500
    assert 0 < len(rows(blocks)) < 8


async def test_a_search_that_stops_says_after_how_much(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(store)
    monkeypatch.setattr(search, "SECONDS", -1.0)
    assert "the search stopped after 0 of " in notices(await found(store, q="km lang"))


async def test_a_page_waits_for_no_texts_and_completes_itself(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(store)
    places = places_of(store)
    places.patience = 0.0
    first = await shown(places, to("search", "run", q="km lang"))
    assert first["page"].live
    assert "rollouts were read so far" in notices(first)
    places.patience = None
    assert "Rollouts 1 to 25 of 32" in await shown(places, to("search", "run", q="km lang"))


async def test_a_store_that_fails_and_bad_addresses_are_said(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(store, groups=1)
    for options, said in (
        ({"where": "moon"}, "no place of texts"),
        ({"failed": "maybe"}, "neither yes nor no"),
        ({"above": "much"}, "is no number"),
        ({"below": "nan"}, "is no number"),
        ({"step": "1.5"}, "no whole number"),
    ):
        assert said in notices(await found(store, **options))

    async def broken(*_: object, **__: object) -> Any:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(store, "transitions_of", broken)
    scan._scans.clear()
    assert "the disk is gone" in notices(await found(store, q="km lang"))


@pytest.mark.parametrize("separate", [True, False])
async def test_texts_of_another_project_are_on_no_page(store: MemoryStore, separate: bool) -> None:
    await store.put_run(Run("theirs", "theirs", {"model": "m"}, project="their-project"))
    await write(store, "theirs")
    projects = Projects(store)

    def seen_by(project: str) -> Places:
        return places_of(projects.of(project) if separate else store, project=project)

    assert "Rollouts 1 to 25 of 32" in await shown(seen_by("their-project"), to("search", "theirs", q="km lang"))
    for address in (
        to("search", "theirs", q="km lang"), "tools/theirs", to("tools", "theirs", step=1), "metrics/theirs", "step/theirs/1",
        "pushed/theirs/1", to("rollout", "theirs", "theirs/1/0/0"), to("compare", runs="theirs"),
        to("versions", of="theirs@0,theirs@1"),
    ):  # fmt: skip
        page = (await shown(seen_by("mine"), address))["page"]
        assert "there is no run" in (said := json.dumps(page.to_json())), address
        assert not any(text in said for text in ("km lang", "by zero", "Divide, please")), address


async def test_a_run_without_rollouts_has_nothing_to_search(store: MemoryStore) -> None:
    await store.put_run(Run("empty", "empty"))
    assert "0 different texts of 0 rollouts" in notices(await found(store, "empty"))
    assert not rows(await found(store, "empty", q="x"))


def test_the_place_of_a_hit_is_right_where_characters_grow_without_case() -> None:
    assert around("ßßß STRASSE ßx", folded_of("straße")) == ("ßßß", "STRASSE", "ßx")
    assert around("aİb", folded_of("b")) == ("aİ", "b", "")
    assert around("Fluß", folded_of("fluss")) == ("", "Fluß", "")
    for many in (search.BLOCK - 1, search.BLOCK, 5 * search.BLOCK + 7):
        assert around("ß" * many + " NEEDLE İx", "needle i")[1:] == ("NEEDLE İ", "x")
