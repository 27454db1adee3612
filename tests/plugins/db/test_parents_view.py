"""The possible parents that one transaction sees, and what becomes of its own calls at its end."""

from __future__ import annotations

from lightning.store.codec import Fingerprint, KnownTransition, ParentCache
from lightning_db.parents_view import ParentsView


async def nothing() -> list[KnownTransition[int]]:
    return []


async def test_a_view_forgets_with_its_transaction_and_shares_what_was_committed() -> None:
    cache = ParentCache[int]()
    for end, left in (("forget", []), ("clear", []), ("keep", [1])):
        view = ParentsView(cache)
        await view.get("a", nothing)
        view.add("a", KnownTransition(1, b"", Fingerprint(4, b"\1\0\0\0")))
        getattr(view, end)()
        assert [each.key for each in view.at_hand("a")] == left
        if end != "keep":
            view.keep()
        assert [each.key for each in await cache.get("a", nothing)] == left
