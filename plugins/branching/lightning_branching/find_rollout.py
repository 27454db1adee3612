"""Finds the rollout that a command line names, in the stores at a place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import TypeVar

from lightning.cli.output import answers
from lightning.errors import ConfigError, LightningError
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.types import Rollout

T = TypeVar("T")


def ask_of_rollout(where: str, rollout: str, ask: Callable[[Store, Rollout], Awaitable[T]]) -> tuple[str, T]:
    """Call `ask` with a rollout and the first store at the place `where` that has it. Return the store's URL and the answer.
    Raises `ConfigError` if no store has the rollout, with the ids nearest to it."""
    near: list[str] = []

    async def look(_: str, store: Store) -> tuple[T] | LightningError | None:
        known = await store.get_rollout(rollout)
        if known is None:
            near.extend(await _nearest(store, rollout))
            return None
        try:
            return (await ask(store, known),)
        except LightningError as error:  # returned, because the search goes on in other stores after a raised one
            return error

    for url, found in answers(where, look):
        if isinstance(found, LightningError):
            raise found
        if found is not None:
            return url, found[0]
    meant = get_close_matches(rollout, near, 3, 0.0)
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ":"
    raise ConfigError(
        f"there is no rollout {rollout!r} in {where}{hint} `lightning runs --runs {where} show RUN` lists those of a run"
    )


async def _nearest(store: Store, rollout: str) -> list[str]:
    """Return the ids most similar to an unknown one, of the run that it begins with or was meant to; else of an only run."""
    runs = [run.id for run in await store.list_runs(brief=True)]
    first, _, rest = rollout.partition("/")
    meant = [first] if first in runs else get_close_matches(first, runs, 1) or (runs if len(runs) == 1 else [])
    step = rest.partition("/")[0]
    for run in meant:
        if await store.get_rollout(f"{run}/{rollout}") is not None:
            return [f"{run}/{rollout}"]
        for only in [int(step)] if step.isdecimal() else []:
            if of_step := [each.id async for each in each_rollout(store, run, step=only)]:
                return get_close_matches(rollout, of_step, 3, 0.0)
        return get_close_matches(rollout, [each.id async for each in each_rollout(store, run)], 3)
    return []
