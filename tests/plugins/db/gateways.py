"""What gateways keep in the store's state of a run, and what of it pruning leaves."""

from __future__ import annotations

import time

from lightning.store.protocol import TRACES_RUN, Store
from lightning.types import Json, Rollout, Run, Task
from lightning_db.keeper import keeper_of
from lightning_server.fleet.records import Notice, Stance, alive_key, notice_key, seat_key, to_json


async def check_state_of_gateways(store: Store, url: str) -> None:
    """Two runs that gateways served, of which one is removed, and what a gateway said of a third after its removal. Of the
    run that stays, seats that nobody can take go. The store is closed for that, as `prune` does."""
    later = time.time() + 3600
    keys = [(run, key) for run in ("gone", "gone-2") for key in (notice_key(run), alive_key(run), seat_key(run, 12))]
    notice = to_json(Notice("owner", 1, Stance.OPEN, 0, 1, (), first=12))
    empty = [seat_key("gone-2", 0), seat_key("gone-2", 11), seat_key("gone-3", 0), notice_key("gone-3")]
    traces: dict[str, list[Json]] = {
        "gone": ["gone-r", 1, later],
        "expired": ["gone-2-r", 1, time.time() - 60],
        "kept": ["gone-2-r", 2, later],
    }
    for run in ("gone", "gone-2"):
        await store.put_run(Run(run, run))
        await store.create_rollouts([Rollout(f"{run}-r", run, Task("x"), f"{run}-g")])
    for _, key in keys:
        await store.put_state("", key, notice)
    for key in empty:
        await store.put_state("", key, notice)
    for trace, value in traces.items():
        await store.put_state(TRACES_RUN, trace, value)
    await store.keep_state("", "gateway_secret", "00")
    await store.close()
    keeper = keeper_of(url)
    await keeper.forget_run("gone")
    await keeper.vacuum()
    await store.open()
    assert [await store.get_state("", key) for _, key in keys] == [None] * 3 + [notice] * 3
    assert [await store.get_state("", key) for key in empty] == [None] * 4
    assert [await store.get_state(TRACES_RUN, trace) for trace in traces] == [None, None, traces["kept"]]
    assert await store.get_state("", "gateway_secret") == "00"
