"""The console's search over the texts of a run: ours beside the naive way, which unpacks every call and looks at its texts.

Printed are the seconds until the first page, until all of the run is read, of a search then (the median of several texts), and
of the naive way; and the ratio of the last two.

    python tests/bench/bench_search.py [--rollouts 12500] [--calls 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lightning.plugins import plugins
from lightning.store.pages import batched, each_rollout
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.trainer.context import mark_over
from lightning.types import Caller, Outcome, Rollout, Run, Task, Transition, logprobs, token_ids
from lightning_console.blocks import Facts
from lightning_console.places import Places
from lightning_console.queries import scan
from lightning_console.router import Address, show
from lightning_record import exchanges
from lightning_record.exchanges import NOBODY, TEXTS, Said

GROUP = 8
POLL = 5.0
"""Seconds between two looks at a page that completes itself: a browser asks about as often."""
SYSTEM = "You are a careful assistant with a calculator and a door. Answer in one line. " * 12
WORDS = (
    *("the", "of", "and", "answer", "tool", "result", "water", "river", "stone", "bridge", "number", "seven", "eight"),
    *("total", "۱۲۳", "جواب", "مرحبا", "คำตอบ", "สะพาน", "🌉"),
)
TEXTS_SOUGHT = ("needle in call", "สะพาน คำตอบ", "bridge", "not there at all", "STONE BRIDGE", "جواب مرحبا")


def calls_of(rollout: Rollout, count: int, dice: random.Random) -> list[Transition]:
    """A conversation that grows by an answer and a tool's result with each call, packed as the gateway packs it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(rollout.task.input)}]
    made, base = [], NOBODY
    for seq in range(count):
        text = " ".join(dice.choices(WORDS, k=60)) + (f" needle in call {seq}" if dice.random() < 0.01 else "")
        answer = {"role": "assistant", "content": text}
        request = exchanges.canonical({"messages": messages, "model": "policy"})
        reply = exchanges.canonical({"choices": [{"index": 0, "message": answer}]})
        packed = exchanges.pack("/chat/completions", 200, request, reply, base)
        made.append(
            Transition(
                *(rollout.id, rollout.attempt, seq, f"{rollout.id}-{seq}"),
                token_ids(range(200 + 100 * seq)),
                token_ids(range(60)),
                logprobs([-0.5] * 60),
                caller=Caller("solver", ("solver",)),
                extras={TEXTS: packed},
            )
        )
        base = Said(seq, request, reply)
        messages = [*messages, answer, {"role": "user", "content": "result: " + " ".join(dice.choices(WORDS, k=30))}]
    return made


async def fill(store: Store, rollouts: int, calls: int) -> None:
    """A run that has ended, in groups of `GROUP` rollouts of one task."""
    dice = random.Random(1)
    await store.put_run(Run("run", "run", {"model": "m"}, 1.7e9))
    names = []
    for n in range(rollouts):
        task, group = Task(f"How many stones has bridge {n // GROUP}?"), f"run/1/{n // GROUP}"
        names.append(Rollout(f"{group}/{n % GROUP}", "run", task, group, 1))
    for first in range(0, rollouts, 500):
        await store.create_rollouts(names[first : first + 500])
        for lease in await store.lease("run", "worker", limit=500):
            await store.append(calls_of(lease.rollout, calls, dice))
            await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=dice.random()))
    await mark_over(store, "run", True)


async def naive(store: Store, text: str) -> set[str]:
    """The rollouts that have a text, by unpacking each call."""
    found, wanted = set(), text.casefold()
    async for some in batched(each_rollout(store, "run"), scan.AT_ONCE):
        for rollout, calls in zip(
            some, await store.transitions_of([(each.id, each.attempt) for each in some]), strict=True
        ):
            for exchange in exchanges.read(calls):
                both = json.dumps([exchange.request, exchange.reply], ensure_ascii=False) if exchange else ""
                if wanted in both.casefold():
                    found.add(rollout.id)
    return found


async def measure(path: Path, rollouts: int, calls: int) -> dict[str, float]:
    """The seconds of each way. Raises `AssertionError` if the two find different rollouts."""
    store = plugins().store(sqlite_url(path))
    await store.open()
    await fill(store, rollouts, calls)
    places = Places(str(path), patience=2.0)
    ask = {text: str(Address("search", ("run",), {"q": text, "where": ""})) for text in TEXTS_SOUGHT}
    await show(places, "runs")  # which people open first, and which imports the pages
    await show(places, str(Address("search", ("none",))))
    began = time.perf_counter()
    page = await show(places, ask[TEXTS_SOUGHT[0]])
    found = {"first page": time.perf_counter() - began}
    while page.live:
        await asyncio.sleep(POLL)
        page = await show(places, ask[TEXTS_SOUGHT[0]])
    found["all of it read"] = time.perf_counter() - began
    took = []
    for address in ask.values():
        began = time.perf_counter()
        await show(places, address)
        took.append(time.perf_counter() - began)
    found |= {"a search": statistics.median(took), "the slowest search": max(took)}
    began = time.perf_counter()
    there = await naive(store, TEXTS_SOUGHT[0])
    found["naive"] = time.perf_counter() - began
    facts = next(block for block in page.blocks if isinstance(block, Facts)).facts
    matched = next(fact.value for fact in facts if fact.name == "rollouts with it")
    assert int(matched.replace(" ", "")) == len(there)
    (own,) = [each for each in scan._scans if each.store() is (await places.find("run")).store]
    found["MB kept"] = own.bytes / 1e6
    await places.close()
    await store.close()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rollouts", type=int, default=12_500)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder) / "lightning.db", asked.rollouts, asked.calls))
    sys.stdout.write(f"{asked.rollouts * asked.calls} calls of {asked.rollouts} rollouts\n")
    sys.stdout.writelines(f"  {name:20} {value:9.3f} {'' if 'MB' in name else 's'}\n" for name, value in found.items())
    sys.stdout.write(f"  naive is {found['naive'] / found['a search']:.0f} times as slow as a search\n")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
