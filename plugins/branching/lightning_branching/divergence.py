"""Find where a replayed agent's request differs from its record, and name the usual cause of such a difference.

The invariant: the place that is named is a difference, and the first one in the order in which a model reads a request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from lightning.types import shared_prefix
from lightning_record.exchanges import written

from lightning_branching.recorded import NOT_RECORDED, RecordedCall

MOST_VALUES: Final = 20_000
"""Most values of a request that are compared with those of another, to find the most similar one."""
SHOWN: Final = 160
"""Number of characters that are shown of a text around its first difference."""
UUID: Final = re.compile(r"\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b", re.IGNORECASE)
TIME: Final = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?"
    r"|\b\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?\b"
    r"|\b1[6-9]\d{8}(?:\d{3})?(?:\.\d+)?\b"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Satur|Sat|Sun)(?:day)?\b,? \w+ \d+"
)
"""Dates, times of day, and seconds or milliseconds since 1970."""
NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
HEX: Final = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b0x[0-9a-f]+\b", re.IGNORECASE)
WORD: Final = re.compile(r"[^\W\d_][\w'-]*|\d+(?:\.\d+)?")
MISSING: Final = object()
"""The value for a place that a request does not have; None stands for JSON's null."""
FIRST: Final = ("model", "system", "instructions", "messages", "input", "prompt", "tools")
"""The fields of a request that a model reads first, in this order; the other fields follow by name."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A request that is not in the record.

    `nearest` is the most similar recorded call; None if no call of this API is left. `place` is the path to the first
    difference between the two requests, `recorded` and `sent` are the values there, and `suspect` names the usual cause of
    such a difference.
    """

    caller: str
    path: str
    nearest: RecordedCall | None
    place: str = ""
    recorded: str = ""
    sent: str = ""
    suspect: str = ""

    def __str__(self) -> str:
        asked = f"{self.caller} asked {self.path} {NOT_RECORDED}"
        if self.nearest is None:
            return f"{asked}: {self.suspect}"
        return (
            f"{asked}. The nearest is call {self.nearest.number} ({self.nearest.caller}); they differ first at {self.place}:\n"
            f"  recorded: {self.recorded}\n  sent now: {self.sent}\n  {self.suspect}"
        )


def diverged(
    body: Mapping[str, Any], caller: str, path: str, candidates: Sequence[RecordedCall], *, threads: bool = False
) -> Divergence:
    """Describe how a request differs from the most similar recorded call. `candidates` are the recorded calls that were not
    answered yet; `threads` says that the agent's calls may overlap, so that a changed order may be a race."""
    same_api = [call for call in candidates if call.exchange.path == path and isinstance(call.exchange.request, dict)]
    if not same_api:
        return Divergence(caller, path, None, suspect="all recorded calls of this API have been answered already")
    sent = Counter(islice(_leaves(body), MOST_VALUES))
    text = written(body)

    def nearness(call: RecordedCall) -> tuple[bool, float, int, int]:
        asked = call.exchange.request
        return call.caller == caller, _alike(sent, asked), _shared_ends(text, written(asked)), -call.number

    nearest = max(same_api, key=nearness)
    place, before, now = next(_differences(nearest.exchange.request, body, ""), ("", None, None))
    cause = suspect(place, before, now, nearest, body, threads=threads)
    return Divergence(caller, path, nearest, place, *_around(_text(before), _text(now)), cause)


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the path to the first difference of two requests, in the order in which a model reads them, and both values there;
    None if they are equal."""
    for place, before, now in _differences(one, other, ""):
        return place, *_around(_text(before), _text(now))
    return None


def _alike(sent: Counter[tuple[str, bytes]], other: Any) -> float:
    """Return the share, from 0 to 1, of values that two requests have in common at the same places."""
    known = Counter(islice(_leaves(other), MOST_VALUES))
    return 2 * (known & sent).total() / max(known.total() + sent.total(), 1)


def _shared_ends(one: bytes, other: bytes) -> int:
    """Count the bytes that two texts share at their beginnings and ends. This finds the right one of parallel calls that have
    no value in common."""
    most = min(len(one), len(other))
    return shared_prefix(one, other) + min(most, shared_prefix(one[::-1], other[::-1]))


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name], f"{place}.{name}")
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # a prompt of token ids is one value
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, written(value)


def _differences(one: Any, other: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place and both values of each difference, in the order in which a model reads a request; `MISSING` stands for a
    value that one of the two does not have."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = {*one, *other}
        for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
            there = f"{place}.{name}" if place else name
            yield from _differences(one.get(name, MISSING), other.get(name, MISSING), there)
    elif isinstance(one, list) and isinstance(other, list):
        for number in range(max(len(one), len(other))):
            here = [each[number] if number < len(each) else MISSING for each in (one, other)]
            yield from _differences(here[0], here[1], f"{place}[{number}]")
    elif one is MISSING or other is MISSING or written(one) != written(other):
        yield place, one, other


def suspect(
    place: str, before: Any, now: Any, nearest: RecordedCall, body: Mapping[str, Any], *, threads: bool = False
) -> str:
    """Return a sentence that names the usual cause of a difference between a recorded and a sent value."""
    was, is_ = _text(before), _text(now)
    request = nearest.exchange.request
    if _is_reordered(request, body):
        return RACE if threads else SET_ORDER
    if _without(UUID, was) == _without(UUID, is_) and UUID.search(was):
        return "Suspect: a uuid (uuid.uuid1, or one that does not come from Python's uuid.uuid4)"
    if _without(TIME, was) == _without(TIME, is_) and TIME.search(was):
        return "Suspect: the clock (time.time, datetime.now): give the agent the time with its task"
    if tool := _tool_of(place, body):
        return f"Suspect: the output of the tool {tool} has changed"
    if _same_words(was, is_):
        return RACE if threads else SET_ORDER
    for pattern in (NUMBER, HEX):
        if _without(pattern, was) == _without(pattern, is_) and pattern.search(was):
            return (
                "Suspect: a random number that lightning does not seed (random.SystemRandom, secrets, os.urandom, a generator "
                "of the agent's own), or code that computes it otherwise than when it was recorded"
            )
    if before is MISSING or now is MISSING:
        return "Suspect: the agent's code has changed since (one of the two has nothing at this place)"
    return "Suspect: the agent's code or its prompt has changed since"


SET_ORDER: Final = (
    "Suspect: the order of a set, which is another one in each process (PYTHONHASHSEED): sort it before it is put into a "
    "prompt"
)
RACE: Final = "Suspect: a race: threads or tasks end in another order each time: gather their results in a fixed order"


def _is_reordered(one: Any, other: Any) -> bool:
    """Whether the first list field in which two requests differ has the same items in another order."""
    for name in ("messages", "input", "tools"):
        theirs, ours = one.get(name), other.get(name)
        if isinstance(theirs, list) and isinstance(ours, list) and theirs != ours:
            if len(theirs) != len(ours):
                return False
            return Counter(map(written, theirs)) == Counter(map(written, ours))
    return False


def _same_words(one: str, other: str) -> bool:
    found = WORD.findall(one)
    return len(found) > 1 and one != other and Counter(found) == Counter(WORD.findall(other))


def _without(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub("·", text)


def _tool_of(place: str, body: Mapping[str, Any]) -> str:
    """Return the name of the tool whose output is at this place of a request; empty if the place is no tool's output."""
    if not (found := re.match(r"(messages|input)\[(\d+)\](?:\.content(?:\[(\d+)\])?|\.output)", place)):
        return ""
    items = body.get(found[1]) or []
    item = items[int(found[2])] if int(found[2]) < len(items) else None
    if not isinstance(item, Mapping):
        return ""
    is_output = item.get("role") == "tool" or item.get("type") == "function_call_output"
    called = item.get("tool_call_id") or item.get("call_id") if is_output else None
    content = item.get("content")
    if called is None and found[3] is not None and isinstance(content, list) and int(found[3]) < len(content):
        part = content[int(found[3])]
        called = part.get("tool_use_id") if isinstance(part, Mapping) and part.get("type") == "tool_result" else None
    return "" if called is None else next(_names(items, str(called)), str(item.get("name") or called))


def _names(items: Iterable[Any], called: str) -> Iterator[str]:
    """Yield the name of the tool that was called with this call id."""
    for item in items:
        if not isinstance(item, Mapping):
            continue
        if item.get("call_id") == called and item.get("name"):
            yield str(item["name"])
        content = item.get("content")
        for call in [*(item.get("tool_calls") or ()), *(content if isinstance(content, list) else ())]:
            if isinstance(call, Mapping) and call.get("id") == called:
                yield str(call.get("name") or (call.get("function") or {}).get("name"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "nothing" if value is MISSING else written(value).decode()


def _around(one: str, other: str) -> tuple[str, str]:
    """Return the part of each text around their first difference."""
    start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, start - SHOWN // 4)
    return _cut(one, start), _cut(other, start)


def _cut(text: str, start: int) -> str:
    end = start + SHOWN
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"
