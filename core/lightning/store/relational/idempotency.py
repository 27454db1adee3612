"""Calls that come again because their answer was lost: what a call was answered, kept under the name of the call.

The invariant: what a call changes and what it is answered are committed together. Whoever makes the same call while the first
one is on its way waits for its end.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final

from lightning.store import sql
from lightning.store.protocol import KNOWN_SECONDS
from lightning.store.relational.transaction import Transaction
from lightning.types import Json

FORGOTTEN_AT_ONCE: Final = 8
"""Old answers that go whenever one is added: they never become many, and nobody waits for their removal."""


async def once(transaction: Transaction, known_as: str, run: str, work: Callable[[], Awaitable[Json]]) -> Json:
    """What `work` is answered, which is done once for each `rules.known_as`; each time for a call without a name.

    `run` is the one that the answer goes with, empty for none.
    """
    if not known_as:
        return await work()
    # The row keeps others out who make the same call, from here on.
    if not await _insert(transaction, known_as, run, KNOWN_SECONDS, None):
        return await recalled(transaction, known_as)
    answer = await work()
    if answer is not None:
        await keep(transaction, known_as, run, KNOWN_SECONDS, answer)
    return answer


async def recalled(transaction: Transaction, known_as: str) -> Json:
    """What a call of this name was answered; None when nobody made it, when it was answered nothing, or too long ago."""
    row = await transaction.one(sql.SELECT_ANSWER, (known_as, await transaction.now()))
    answer: Json = None if row is None else json.loads(row[0])
    return answer


async def keep(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> None:
    """Keep for `seconds` what the call of this name is answered, in place of what it was answered before."""
    until = await transaction.now() + seconds
    if not await transaction.run(sql.KEEP_ANSWER, (json.dumps(answer), until, known_as)):
        await _insert(transaction, known_as, run, seconds, answer)


async def _insert(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> bool:
    """Whether nothing was known under this name, or no more."""
    now = await transaction.now()
    for (old,) in await transaction.free(sql.SELECT_OLD_ANSWERS, (now, FORGOTTEN_AT_ONCE)):
        await transaction.run(sql.FORGET_ANSWER, (old,))
    return bool(await transaction.run(sql.INSERT_ANSWER, (known_as, run, now + seconds, json.dumps(answer), now)))
