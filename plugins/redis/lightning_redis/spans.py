"""Appending spans and reading them back.

The invariant: a span belongs to the attempt that was current when it arrived, its first content stays, and no attempt has more
than `MAX_SPANS` of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.errors import StoreError
from lightning.store import rows
from lightning.store.protocol import MAX_SPANS
from lightning.types import Span

from lightning_redis import lua_scripts
from lightning_redis.loop_client import Link, done
from lightning_redis.transitions import current_attempt


async def append(link: Link, spans: Sequence[Span]) -> int:
    """See `Store.append_spans`."""
    texts = [rows.dump(list(rows.SPANS.values(span))) for span in spans]
    if not spans:
        return 0
    places: dict[bytes, int] = {}
    arguments: list[str | int] = []
    for span, text in zip(spans, texts, strict=True):
        key = link.keys("spans", span.attempt, span.rollout)
        place = places.setdefault(key, len(places) + 1)
        arguments += [span.rollout, span.attempt, place, span.span_id, text]
    rest = done(
        await link.run(lua_scripts.SPANS, (link.keys("standing"), *places), *(MAX_SPANS, len(spans), *arguments))
    )
    return int(rest[0])


async def read(link: Link, rollout: str, attempt: int | None) -> list[Span]:
    """See `Store.spans`."""
    current = await current_attempt(link, rollout)
    attempt = current if attempt is None else attempt
    (texts,) = await link.reads.read((b"HVALS", link.keys("spans", attempt, rollout)))
    found = [_span(rollout, attempt, text) for text in texts]
    return sorted(found, key=lambda span: (span.started_at, span.span_id))


def _span(rollout: str, attempt: int, text: bytes) -> Span:
    what = f"a span of rollout {rollout!r}"
    row = rows.load(text.decode(errors="replace"), what)
    try:
        return rows.SPANS.read(tuple(row), rollout=rollout, attempt=attempt)  # type: ignore[arg-type]  # anything else raises
    except (ValueError, TypeError) as error:
        raise StoreError(f"{what} is corrupt in the database: {error}. Restore the database from a backup") from error
