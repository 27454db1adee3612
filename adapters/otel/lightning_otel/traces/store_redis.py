"""Spans in Redis, in the hashes `spans:ATTEMPT:ROLLOUT` by span id.

The invariant: it keeps what `lightning_otel.traces.store` promises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from lightning.errors import StoreError
from lightning.store import rows
from lightning.types import Span
from lightning_redis import lua_scripts
from lightning_redis.loop_client import Link, done
from lightning_redis.transitions import current_attempt

from lightning_otel.traces.store import MAX_SPANS

APPEND: Final = lua_scripts.script(
    "spans",
    """
-- keys: standing
-- arguments: most count
-- For each span: rollout, attempt, the place of its attempt, span id, text. A span that comes again is there already.

local current, stored = {}, 0
for i = 0, tonumber(count) - 1 do
  local at = REST + i * 5
  local rollout, attempt = ARGV[at + 1], tonumber(ARGV[at + 2])
  if current[rollout] == nil then
    local position = stand(standing, rollout)
    current[rollout] = position and position.attempt or 0
  end
  if attempt > 0 and attempt == current[rollout] then
    local spans, id = KEYS[MORE + tonumber(ARGV[at + 3])], ARGV[at + 4]
    if redis.call('HEXISTS', spans, id) == 1 then
      stored = stored + 1
    elseif redis.call('HLEN', spans) < tonumber(most) then
      redis.call('HSET', spans, id, ARGV[at + 5])
      stored = stored + 1
    end
  end
end
return {'ok', stored}
""",
)


async def append(link: Link, spans: Sequence[Span]) -> int:
    """Store spans, and return how many of them are stored now."""
    texts = [rows.dump(list(rows.SPANS.values(span))) for span in spans]
    if not spans:
        return 0
    places: dict[bytes, int] = {}
    arguments: list[str | int] = []
    for span, text in zip(spans, texts, strict=True):
        key = link.keys("spans", span.attempt, span.rollout)
        place = places.setdefault(key, len(places) + 1)
        arguments += [span.rollout, span.attempt, place, span.span_id, text]
    rest = done(await link.run(APPEND, (link.keys("standing"), *places), *(MAX_SPANS, len(spans), *arguments)))
    return int(rest[0])


async def read(link: Link, rollout: str, attempt: int | None) -> list[Span]:
    """Return the spans of an attempt (None: the current one) in the order they began."""
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


FUNCTIONS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {"append_spans": append, "spans": read}
"""The functions of the operations, by the operations' names."""
