"""Read the rollouts of a run once, and keep the parts that are searched and counted: their texts, tool runs and tool calls.

The invariant: a scan reads the store and writes nothing. A message is kept once, however many calls and rollouts have it. All
scans together keep at most `MOST_BYTES` of texts and `MOST_KEPT` of everything else, and a scan says how far it got. A rollout
that has not ended is read again. Reading takes at most `READERS` threads, which nobody else needs, and beside a gateway or a
run that goes on it rests most of the time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import threading
import time
import unicodedata
import weakref
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from lightning.store.pages import batched
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.context import is_over
from lightning.trainer.summary import reason
from lightning.types import UNNAMED, Fault, Json, Rollout, Status, ToolEvent, Transition
from lightning_debug.ab import earned
from lightning_debug.transcript import ToolCall, said_in
from lightning_record.exchanges import parents_of

from lightning_console.places import SERVER, Located, rollout_of
from lightning_console.queries.conversation import Said, Vocabulary, one_line, said_by, vocabulary_of
from lightning_console.queries.memo import Memo, apart, stamp_of

MOST_BYTES: Final = 256 << 20
"""Most bytes of texts that all scans of this process keep together."""
MOST_KEPT: Final = 256 << 20
"""Most bytes of rollouts and tool runs that all scans of this process keep together."""
EACH_TEXT: Final = 120
"""Bytes that a text takes besides its characters: in the lists of a scan and in its table of numbers."""
READERS: Final = 2
"""How many runs are read at a time."""
REST: Final = 4.0
"""Beside a run that goes on or a gateway, a reader rests this many times as long as it reads."""
MOST_SCANS: Final = 6
LONGEST: Final = 1_000_000
"""Most characters of a text that are searched: the first ones."""
AT_ONCE: Final = 8
"""How many rollouts are read at a time. A rollout of long calls takes more than 20 MB while it is read."""
MOST_ARGUMENTS: Final = 16
SHORT: Final = 200
"""Most characters that are kept of an argument's value, of an answer behind a tool run, and of an error."""
NAMED_TOOL: Final = re.compile(r'"name"\s*:\s*"([\w.-]{1,80})"')
"""The name of the tool in a tool call that stands in an answer's text."""
WRITTEN_AS_TEXT: Final = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<｜tool▁call▁begin｜>")
"""Marks with which models begin a tool call. In the text of an answer such a mark means that the call was not understood."""

Kind = Literal["task", "prompt", "answer", "tool", "error"]
"""Where a text stands: in the task's input, in a request, in an answer, in a tool's arguments or result, or in an error."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Trouble = Literal["tool", "argument", "as text", "never run"]
"""What is wrong with a tool call: its tool was not offered, the tool has no such argument, it stands in the answer's text, or
no result of it is recorded."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One run of a tool. `status` is that of its `ToolEvent`, or `unreported` if only its result in a later request is known.
    `arguments` are None if they are not known; `said` is the text of the answer that led to the run. `call` is the number of
    the call that asked for it, 0 if not known."""

    tool: str
    agent: str
    status: str
    call: int
    arguments: Mapping[str, Json] | None
    error: str = ""
    said: str = ""

    @property
    def failed(self) -> bool:
        """Whether the tool ended with an error."""
        return self.status == "error"

    @property
    def known(self) -> bool:
        """Whether it is known that the tool succeeded or failed."""
        return self.status in ("ok", "error")


@dataclass(frozen=True, slots=True)
class OddCall:
    """A tool call that could not run as it was written. `name` is the tool's name, `detail` the argument or the text, and `why`
    says what is wrong with a text that should have been a tool call (empty if that is not known)."""

    trouble: Trouble
    name: str
    agent: str
    call: int
    detail: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Scanned:
    """The parts of a rollout that a scan keeps. `marks` has three numbers for each text: the text's number, the index of its
    kind in `KINDS`, and the number of its call (0 for none). `missing` counts the calls whose texts are not as they were, by
    reason. `offers` says whether some request offered tools. `cut_off` has the numbers of the calls whose answers ended at the
    limit of tokens."""

    id: str
    task: str
    group: str
    input: str
    split: str
    step: int
    status: Status
    fault: Fault | None
    reward: float | None
    calls: int
    runs: tuple[ToolRun, ...]
    odd: tuple[OddCall, ...]
    offers: bool
    marks: array[int]
    missing: Mapping[str, int]
    is_branch: bool = False
    cut_off: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        texts = sum(400 + len(str(run.arguments)) + len(run.error) + len(run.said) for run in self.runs)
        return 900 + len(self.input) + texts + sum(300 + len(each.detail) for each in self.odd) + 4 * len(self.marks)

    @property
    def score(self) -> float | None:
        """The reward, and 0 if the rollout failed; None if it has not ended or was lost to the infrastructure."""
        return earned(self)


_serials = itertools.count()


class Scan:
    """The rollouts of a run that were read so far, and their texts by number. `whole` says that all are read; `left_out`
    counts texts for which there was no room (`MOST_BYTES`), `cut` those of which only the beginning is kept; `full` says that
    there was no room for further rollouts (`MOST_KEPT`). `serial` tells the scan from every other; a `part` is of some rollouts
    of the run, and keeps no texts."""

    def __init__(self, store: Store, about: Hashable, *, part: bool = False) -> None:
        self.part = part
        self.store, self.about, self.serial = weakref.ref(store), about, next(_serials)
        self.rollouts: dict[str, Scanned] = {}
        self.texts: list[str] = []
        self.folded: list[str] = []
        """Each text as it is searched, without case; empty for a text in ASCII, which is folded again at each search."""
        self.total = 0
        """How many rollouts the run has; 0 if not known, as for those of a step."""
        self.bytes, self.kept = 0, 0
        """How many bytes its texts take, and how many its rollouts."""
        self.whole, self.full, self.left_out, self.cut = False, False, 0, 0
        self._numbers: dict[str, int] = {}
        self._waiting: set[str] = set()
        self._cursor = ""

    def has(self, rollout: str) -> bool:
        """Return whether all rollouts are read, and a `rollout` (unless empty) as it ended."""
        known = rollout in self.rollouts and rollout not in self._waiting
        return self.whole and not self.full and (known or not rollout)

    def number_of(self, text: str) -> int | None:
        """Return the number of a text, which is kept if it is new; None if there is no room for it."""
        if len(text) > LONGEST:
            self.cut, text = self.cut + 1, text[:LONGEST]
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        if (known := self._numbers.get(text)) is not None:
            return known
        folded = "" if text.isascii() else text.casefold()
        size = EACH_TEXT + sys.getsizeof(text) + (sys.getsizeof(folded) if folded and folded != text else 0)
        if not _has_room(self, "bytes", size):
            return None
        self.bytes += size
        self._numbers[text] = len(self.texts)
        self.folded.append(text if folded == text else folded)
        self.texts.append(text)
        return len(self.texts) - 1

    async def extend(self, located: Located, step: int | None, rollout: str, rest: float) -> None:
        """Read the rollouts that are new or had not ended when they were read, until there is no room or the scan is forgotten.
        After each few it rests `rest` times as long as reading them took."""
        self.whole = self.full
        vocabulary = vocabulary_of(located)
        async for some in batched(self._unread(located, step, rollout), AT_ONCE):
            began = time.monotonic()
            attempts = [(each.id, each.attempt) for each in some]
            calls, ended = await located.store.transitions_of(attempts), await located.store.attempts_of([*attempts])
            parents = await parents_of(located.store, some, dict(zip(attempts, calls, strict=True)))
            for each, own, end, parent in zip(some, calls, ended, parents, strict=True):
                said = said_by(own, vocabulary, parent)
                if not self._keep(each, _scanned(self, each, own, said, end.tool_events, vocabulary)):
                    self.whole = self.full
                    return
            await asyncio.sleep(rest * (time.monotonic() - began))
        self.whole = True

    def _keep(self, rollout: Rollout, scanned: Scanned) -> bool:
        """Keep a rollout that was read; return False if there is no room or the scan was forgotten."""
        known = self.rollouts.get(rollout.id)
        size = scanned.size - (known.size if known is not None else 0)
        if not _has_room(self, "kept", size):
            self.full = self in _scans
            return False
        self.kept += size
        self.rollouts[rollout.id] = scanned
        (self._waiting.discard if rollout.status.ended else self._waiting.add)(rollout.id)
        return True

    async def _unread(self, located: Located, step: int | None, rollout: str) -> AsyncIterator[Rollout]:
        if rollout:
            yield await rollout_of(located, rollout)
            return
        for name in sorted(self._waiting):
            if (found := await located.store.get_rollout(name)) is not None:
                yield found
        while True:
            page = await located.store.list_rollouts(located.run.id, step=step, cursor=self._cursor)
            for each in page.items:
                if each.id not in self.rollouts:
                    yield each
            if not page.cursor:
                return
            self._cursor = page.cursor


_scans: list[Scan] = []
_lock = threading.Lock()
_extended: Memo[None] = Memo(busy=1.0 / (1.0 + REST))
_readers = ThreadPoolExecutor(READERS, "console-reader")


def _has_room(scan: Scan, kind: Literal["bytes", "kept"], size: int) -> bool:
    """Return whether a scan may keep `size` more bytes of a kind; scans that were not used for longer are forgotten for it."""
    with _lock:
        if scan not in _scans:  # it was forgotten while it was read
            return False
        while sum(getattr(each, kind) for each in _scans) + size > (MOST_BYTES if kind == "bytes" else MOST_KEPT):
            if _scans[0] is scan:
                return False
            _scans.pop(0)
    return True


async def scan_of(located: Located, *, step: int | None = None, rollout: str = "", patience: float | None) -> Scan:
    """Return the scan of a run as far as it got within `patience` seconds (None: all of it); the rest is read in the
    background. With a `step` or the id of a `rollout` it has at least those rollouts, and perhaps no texts. Raises `StoreError`
    if the store cannot be read, `DataError` if there is no such rollout."""
    store, run = located.store, located.run
    pruned = json.dumps(await store.get_state(run.id, PRUNED), default=str)
    about: tuple[Hashable, ...] = (run.id, run.created_at, pruned)
    with _lock:
        _scans[:] = [each for each in _scans if each.store() is not None]
        known = next((each for each in _scans if each.store() is store and each.about == about), None)
        part = (step is not None or bool(rollout)) and (known is None or not known.has(rollout))
        if part:
            about = (*about, step, rollout)
            known = next((each for each in _scans if each.store() is store and each.about == about), None)
        else:
            step, rollout = None, ""
        if known is None:
            known = Scan(store, about, part=part)
        else:
            _scans.remove(known)
        _scans.append(known)
        if len(_scans) > MOST_SCANS:
            _scans.remove(next((each for each in _scans[:-1] if each.part), _scans[0]))
    made = known

    if not made.part:
        made.total = sum(each.rollouts for each in await store.count_rollouts(run.id))
    beside = patience is not None and not made.part and (located.url == SERVER or not await is_over(store, run.id))

    async def extend() -> None:
        await made.extend(located, step, rollout, REST if beside else 0.0)

    def read() -> Awaitable[None]:
        if made.part:
            return apart(extend)
        return asyncio.get_running_loop().run_in_executor(_readers, lambda: asyncio.run(extend()))

    await _extended.soon(store, (*about, made.serial), await stamp_of(store, run.id), read, patience)
    return made


# one rollout ----------------------------------------------------------------------------------------------------------------
def _scanned(
    scan: Scan,
    rollout: Rollout,
    calls: Sequence[Transition],
    said: Sequence[Said],
    events: Sequence[ToolEvent],
    vocabulary: Vocabulary,
) -> Scanned:
    runs, odd = _tools(rollout, calls, said, events)
    marks, seen = array("i"), set[tuple[int, str]]()
    for kind, text, call in () if scan.part else _texts(rollout, calls, said, events, vocabulary):
        number = scan.number_of(text) if text else None
        # An earlier answer comes back in later requests, where it is no prompt.
        mark = None if number is None else (number, kind if kind in ("task", "error") else "")
        if number is not None and mark is not None and mark not in seen:
            seen.add(mark)
            marks.extend((number, KINDS.index(kind), call))
        elif text and number is None:
            scan.left_out += 1
    return Scanned(
        rollout.id,
        rollout.task.id,
        rollout.group,
        one_line(rollout.task.input, SHORT),
        rollout.split,
        rollout.step,
        rollout.status,
        rollout.fault,
        rollout.reward,
        len(calls),
        tuple(runs),
        tuple(odd),
        any(offered_tools(each.request) is not None for each in said),
        marks,
        dict(Counter(each.missing for each in said if each.missing)),
        rollout.parent is not None,
        cut_off=tuple(number for number, call in enumerate(calls, 1) if call.finish_reason == "length"),
    )


def _texts(
    rollout: Rollout,
    calls: Sequence[Transition],
    said: Sequence[Said],
    events: Sequence[ToolEvent],
    vocabulary: Vocabulary,
) -> Iterator[tuple[Kind, str, int]]:
    """Yield the texts of a rollout with their kinds and the numbers of their calls. A text may come several times."""
    yield "task", plain(rollout.task.input), 0
    yield "error", rollout.error, 0
    told: dict[str, list[Any]] = {}
    for number, (call, one) in enumerate(zip(calls, said, strict=True), 1):
        yield "error", call.error, number
        items = items_of(one.request)
        known = told.get(call.caller.name, ())
        first = next((at for at, (new, old) in enumerate(zip(items, known, strict=False)) if new != old), len(known))
        told[call.caller.name] = items
        for item in items[first:]:
            yield from ((kind, text, number) for kind, text in _parts(item))
        if one.reply or vocabulary.tokenizer is not None:
            yield "answer", one.text, number
        yield from (("tool", str(made), number) for made in one.tool_calls)
    numbers = {call.id: number for number, call in enumerate(calls, 1)}
    for event in events:
        call_number = numbers.get(event.response_id, 0)
        yield "tool", str(ToolCall(event.name, event.arguments)), call_number
        yield "tool", event.output, call_number
        yield "error", event.error, call_number


def items_of(request: Mapping[str, Any]) -> list[Any]:
    """Return the messages or items of a request of any of the four APIs, the system's instructions first."""
    found: list[Any] = [
        {"role": "system", "content": request[name]} for name in ("system", "instructions") if request.get(name)
    ]
    for name in ("prompt", "messages", "input"):
        given = request.get(name)
        if isinstance(given, list) and not all(isinstance(each, int) for each in given):
            found += [{"role": "user", "content": each} if isinstance(each, str) else each for each in given]
        elif isinstance(given, str):
            found.append({"role": "user", "content": given})
    return found


def _parts(item: Any) -> Iterator[tuple[Kind, str]]:
    """Yield the texts of a message of a request. The model's own earlier answers are in it, too."""
    if not isinstance(item, Mapping):
        return
    if str(item.get("type")).endswith("_output"):
        yield "tool", plain(item.get("output"))
        return
    kind: Kind = "tool" if item.get("role") in ("tool", "function") else "prompt"
    content = item.get("content")
    if isinstance(content, str) and not item.get("tool_calls"):
        yield kind, content
        return
    text, made = said_in(item)
    yield kind, text
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") == "tool_result":
            yield "tool", plain(part.get("content"))
        elif isinstance(part, Mapping) and part.get("type") == "input_text":
            yield kind, str(part.get("text", ""))
    yield from (("tool", str(each)) for each in made)


def plain(value: Any) -> str:
    """Return a value as a text: a text as it is, a list of parts with texts as these, anything else as JSON."""
    if isinstance(value, str) or value is None:
        return value or ""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "\n".join(str(part["text"]) for part in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def results_in(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results of tools in a request, each as the id of its tool call and the text."""
    for item in items_of(request):
        if not isinstance(item, Mapping):
            continue
        if str(item.get("type")).endswith("_output"):
            yield str(item.get("call_id")), plain(item.get("output"))
        elif item.get("role") == "tool":
            yield str(item.get("tool_call_id")), plain(item.get("content"))
        content = item.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "tool_result":
                yield str(part.get("tool_use_id")), plain(part.get("content"))


def offered_tools(request: Mapping[str, Any]) -> dict[str, frozenset[str] | None] | None:
    """Return the tools that a request of any of the four APIs offers, each with the names of its arguments (None if it takes
    any or does not say); None for a request without tools."""
    given = request.get("tools") or request.get("functions")
    if not isinstance(given, list):
        return None
    found: dict[str, frozenset[str] | None] = {}
    for each in given:
        about = each.get("function") or each.get("custom") or each if isinstance(each, Mapping) else None
        if not isinstance(about, Mapping):
            continue
        schema = about.get("parameters") or about.get("input_schema")
        names = schema.get("properties") if isinstance(schema, Mapping) else None
        takes_any = isinstance(schema, Mapping) and bool(schema.get("additionalProperties"))
        known = isinstance(names, Mapping) and not takes_any
        found[str(about.get("name") or about.get("type"))] = frozenset(names) if known and names is not None else None
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A tool call of an answer: its id, the number of its call, and who made it."""

    id: str
    made: ToolCall
    call: int
    agent: str
    response: str


def _tools(
    rollout: Rollout, calls: Sequence[Transition], said: Sequence[Said], events: Sequence[ToolEvent]
) -> tuple[list[ToolRun], list[OddCall]]:
    """Return the tool runs of a rollout, and the tool calls that could not run as they were written."""
    asked, odd = _asked(calls, said)
    by_id = {each.id: each for each in asked if each.id}
    by_response = {call.id: number for number, call in reversed(list(enumerate(calls, 1)))}
    runs, ran = [], set[int]()
    for event in events:
        behind = by_id.get(event.call_id) or next(
            (
                each
                for each in asked
                if id(each) not in ran
                and each.made.name == event.name
                and (each.response == event.response_id or not (event.response_id or event.call_id))
            ),
            None,
        )
        number = behind.call if behind else by_response.get(event.response_id, 0)
        if behind:
            ran.add(id(behind))
        elif event.kind == "unknown_tool":
            odd.append(
                OddCall(
                    "tool", one_line(event.name, SHORT), _agent(event, calls, number), number, "the agent reported it"
                )
            )
        arguments = event.arguments if event.arguments is not None or behind is None else behind.made.arguments
        text = said[number - 1].text if number else ""
        runs.append(
            ToolRun(
                one_line(event.name, SHORT),
                _agent(event, calls, number),
                event.status,
                number,
                _short(arguments),
                one_line(str(reason(event.error)), SHORT) if event.error else "",
                one_line(text, SHORT),
            )
        )
    waiting = [each for each in asked if id(each) not in ran]
    results = dict(result for one in said[1:] for result in results_in(one.request)) if waiting else {}
    for each in waiting:
        if each.id in results:
            runs.append(
                ToolRun(
                    one_line(each.made.name, SHORT), each.agent, "unreported", each.call, _short(each.made.arguments)
                )
            )
        elif rollout.status.ended:
            odd.append(
                OddCall(
                    "never run", one_line(each.made.name, SHORT), each.agent, each.call, one_line(str(each.made), SHORT)
                )
            )
    return runs, odd


def _asked(calls: Sequence[Transition], said: Sequence[Said]) -> tuple[list[_Asked], list[OddCall]]:
    """Return the tool calls of all answers, and those that name a tool or an argument that was not offered."""
    asked: list[_Asked] = []
    odd: list[OddCall] = []
    for number, (call, one) in enumerate(zip(calls, said, strict=True), 1):
        agent, offered = call.caller.name, offered_tools(one.request)
        ids = call.tool_calls if len(call.tool_calls) == len(one.tool_calls) else ("",) * len(one.tool_calls)
        for name, made in zip(ids, one.tool_calls, strict=True):
            asked.append(_Asked(name, made, number, agent, call.id))
            called = one_line(made.name, SHORT)
            if one.request and made.name not in (offered or {}):
                odd.append(OddCall("tool", called, agent, number, one_line(str(made), SHORT)))
            takes = (offered or {}).get(made.name)
            if takes is not None and isinstance(made.arguments, Mapping):
                unknown = [each for each in made.arguments if each not in takes]
                odd += [OddCall("argument", called, agent, number, one_line(each, SHORT)) for each in unknown]
        if not one.tool_calls and any(mark in one.text for mark in WRITTEN_AS_TEXT):
            named = NAMED_TOOL.search(one.text)
            name = named[1] if named else ""
            odd.append(OddCall("as text", name, agent, number, one_line(one.text, SHORT), _broken(one.text)))
    return asked, odd


def _broken(text: str) -> str:
    """Say what is wrong with a tool call that stands in an answer's text; empty if it is no JSON, or nothing is wrong."""
    given = text.partition(WRITTEN_AS_TEXT[0])[2].partition("</tool_call>")
    if not given[0].lstrip().startswith("{"):
        return ""
    try:
        json.loads(given[0])
    except (ValueError, RecursionError):
        return "broken JSON"
    return ""


def _agent(event: ToolEvent, calls: Sequence[Transition], number: int) -> str:
    if event.caller is not None:
        return event.caller.name
    return calls[number - 1].caller.name if number else UNNAMED.name


def _short(arguments: Json) -> dict[str, Json] | None:
    """Return the arguments of a tool run by name, with long values cut; None if they are not known."""
    if arguments is None:
        return None
    given = arguments if isinstance(arguments, Mapping) else {"": arguments}
    return {
        str(name): value if isinstance(value, bool | int | float) or value is None else one_line(value, SHORT)
        for name, value in list(given.items())[:MOST_ARGUMENTS]
    }
