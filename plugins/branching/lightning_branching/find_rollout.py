"""Finds the rollout that a command line names, in the stores at a place."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Final, TypeVar

from lightning.cli.output import answers, with_store
from lightning.errors import ConfigError, LightningError
from lightning.store.pages import each_rollout
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.types import Rollout

T = TypeVar("T")

DIGITS: Final = 9
"""Most digits of a step that is looked up: databases refuse longer numbers."""


def ask_of_rollout(where: str, rollout: str, ask: Callable[[Store, Rollout], Awaitable[T]]) -> tuple[str, T]:
    """Call `ask` with a rollout and the first store at the place `where` that has it. Return the store's URL and the answer.
    Raises `ConfigError` if no store has the rollout, with the ids nearest to it."""
    missed: list[str] = []

    async def look(_: str, store: Store) -> tuple[T] | LightningError | None:
        known = await store.get_rollout(rollout)
        if known is None:
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
        missed.append(url)
    near: list[str] = []
    for url in missed:
        with suppress(LightningError):  # what is missing is known already, so that a store that fails now gives no hint
            near += asyncio.run(with_store(url, partial(_nearest, rollout)))
    meant = get_close_matches(rollout, near, 3, 0.0)  # the nearest of all stores; each is near enough
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ":"
    command = shlex.join(["lightning", "runs", "--runs", redacted(where), "show", "RUN"])
    raise ConfigError(f"there is no rollout {rollout!r} in {redacted(where)}{hint} `{command}` lists those of a run")


async def _nearest(rollout: str, store: Store) -> list[str]:
    """Return the ids similar to an unknown one, of the run that it begins with or was meant to; else of an only run."""
    runs = [run.id for run in await store.list_runs(brief=True)]
    first, _, rest = rollout.partition("/")
    meant = [first] if first in runs else get_close_matches(first, runs, 1) or (runs if len(runs) == 1 else [])
    if not meant:
        return []
    run, step = meant[0], rest.partition("/")[0]
    if await store.get_rollout(f"{run}/{rollout}") is not None:
        return [f"{run}/{rollout}"]
    known: list[str] = []
    if step.isdecimal() and len(step) <= DIGITS:
        known = [each.id async for each in each_rollout(store, run, step=int(step))]
    return get_close_matches(rollout, known or [each.id async for each in each_rollout(store, run)], 3)
