"""A budget of memory: never more than there is, and room for whoever holds little."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning import memory_budget
from lightning.memory_budget import Budget, Holder, Holders, bounded, json_values, memory

MOST = 1000


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, MOST), st.booleans())))
async def test_never_more_is_held_and_a_newcomer_finds_room(steps: list[tuple[int, int, bool]]) -> None:
    budget = Budget(MOST)
    holders = [Holder(budget) for _ in range(5)]
    for number, size, gives in steps:
        holder = holders[number]
        if gives:
            holder.give(min(size, holder.held))
        else:
            holder.take(size)
        assert budget.held == sum(each.held for each in holders) <= MOST
        assert all(each.held <= budget.largest for each in holders)
        newcomer = Holder(budget)
        assert newcomer.take((MOST - budget.held) // 2)
        newcomer.give(newcomer.held)


def values_of(value: object) -> int:
    """The values in parsed JSON that are not the names of others."""
    if isinstance(value, dict):
        return 1 + sum(map(values_of, value.values()))
    return 1 + sum(map(values_of, value)) if isinstance(value, list) else 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=40,
)


@given(JSON)
def test_json_has_no_more_values_than_its_commas_and_brackets_say(value: object) -> None:
    """Each value but the first follows a comma or an opening bracket."""
    assert values_of(value) <= 2 * json_values(orjson.dumps(value)) + 1


@given(JSON, st.integers(1, 7))
def test_it_does_not_matter_how_json_is_cut(value: object, size: int) -> None:
    data = orjson.dumps(value)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert sum(map(json_values, pieces)) == json_values(data)


async def test_who_waits_gets_room_when_there_is_some_and_not_later() -> None:
    budget = Budget(MOST)
    first, second = Holder(budget), Holder(budget)
    assert first.take(500)
    assert not await second.wait(501, 1e9), "it never fits, so it is not waited for"
    assert not await second.wait(400, 0.01)
    waiting = asyncio.create_task(second.wait(400, 60))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.give(500)
    assert await waiting
    assert (budget.held, second.held) == (400, 400)


async def test_long_work_is_done_one_after_the_other_beside_the_loop_and_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(MOST)
    holder, names = Holder(budget), []
    slept: list[float] = []
    sleep = asyncio.sleep

    async def sleeping(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(memory_budget.asyncio, "sleep", sleeping)

    def work() -> float:
        names.append(threading.current_thread().name)
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return time.thread_time() - began

    took = await asyncio.gather(*(holder.work(work) for _ in range(3)))
    assert len(set(names)) == 1
    assert names[0] != threading.current_thread().name
    assert len(slept) == 2
    assert all(5 * took[0] < rest < 60 * took[0] for rest in slept)
    await Holder(budget).work(work)
    assert len(slept) == 2, "another one does not rest for it"
    budget.close()


def test_the_memory_is_that_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory()
    for said, found in (("max\n", machine), ("1048576\n", 1048576), (str(1 << 60), machine)):
        (tmp_path / "max").write_text(said)
        monkeypatch.setattr(memory_budget, "CONTROL_GROUP", tmp_path / "max")
        assert memory() == found
    assert Budget().most == machine // 8


async def test_a_holder_is_remembered_while_somebody_works_with_it_or_it_rests() -> None:
    budget = Budget(MOST)
    holders = Holders(budget)
    mine = holders.of(b"mine")
    assert mine.take(400)
    for invented in range(20_000):
        holders.done(holders.of(b"%d" % invented))
    assert holders.of(b"mine") is mine
    assert len(holders) == 1, "those who left nothing behind are forgotten"

    def work() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass

    await mine.work(work)
    mine.give(400)
    holders.done(mine)
    rests = mine.rests
    del mine
    assert rests
    assert holders.of(b"mine").rests, "its rest is not over because nobody asks"
    budget.close()


async def test_a_holder_that_has_rested_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "REST", 0.0)
    budget = Budget(MOST)
    holders = Holders(budget)
    holder = holders.of(b"mine")
    await holder.work(lambda: None)
    holders.done(holder)
    del holder
    assert len(holders) == 0
    budget.close()


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"[" * 40, b"," * 40, b"word " * 8]), max_size=40))
async def test_what_comes_in_parts_is_taken_up_to_its_bytes_and_its_values(parts: list[bytes]) -> None:
    """However it is cut, and whether or not the values had to be counted from its beginning."""
    most = 20 * memory_budget.VALUE_BYTES // memory_budget.MEMORY_OF_BYTE  # 320 bytes or 20 values

    async def come() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    whole = b"".join(parts)
    fits = len(whole) <= most and json_values(whole) <= 20
    assert await bounded(come(), most) == (whole if fits else None)
