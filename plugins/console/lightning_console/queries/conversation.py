"""A rollout's conversation as people read it: each message once, in the order in which it was sent or answered.

Texts come from the recorded exchanges, else from decoded token ids.

The invariant: a message that an agent sends again unchanged is not repeated; an earlier message that it changed is shown again.
`missing` says why a text is not the recorded one. A token's text comes from the tokenizer in the model's folder that the run
names, or is the id; nothing is downloaded and no code of a model is run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.errors import StoreError
from lightning.safe_text import counted
from lightning.store.url import parse
from lightning.trainer.model import models_in
from lightning.types import Json, StepReward, StepState, Transition
from lightning_debug.transcript import REDACTED, ToolCall, said_in, text_of, tool_calls_of, why_not_whole
from lightning_record import exchanges
from lightning_record.exchanges import Exchange, Parent

from lightning_console.places import SERVER, Located

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE: Final = "tokenizer.json"
WORD_START: Final = "▁"
"""SentencePiece's sign for the space before a word. Decoding a single token drops this space."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of a run's model; `missing` says why there is none, and is empty if there is."""

    tokenizer: Tokenizer | None = None
    missing: str = ""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself; `#ID` for an unknown token."""
        return [self._text(token) for token in ids]

    def text(self, ids: Sequence[int]) -> str:
        """Decode all tokens together, special ones included; without a tokenizer, return the ids."""
        if self.tokenizer is None:
            return " ".join(f"#{token}" for token in ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _text(self, token: int) -> str:
        if self.tokenizer is None or (piece := self.tokenizer.id_to_token(token)) is None:
            return f"#{token}"
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        if piece.startswith(WORD_START) and not text.startswith(" "):
            text = f" {text}"
        return text or piece


def vocabulary_of(located: Located) -> Vocabulary:
    """Load the tokenizer of the model that the run began with, or the copy in the run's own folder if the model has moved."""
    config, url = located.run.config, located.url
    model = str(config.get("model") or config.get("evaluates") or "")
    if not model:
        return Vocabulary(missing="the run names no model, so that tokens are shown as ids")
    if url == SERVER:
        return Vocabulary(missing="tokens are shown as ids: a server reads no folder that a run names")
    beside = models_in(Path(parse(url).path).parent / "model") if url.startswith("sqlite:") else {}
    for folder in (Path(model), *beside.values()):
        file = folder / FILE
        try:
            return Vocabulary(_loaded(file, file.stat().st_mtime_ns))
        except (OSError, ValueError):
            continue
    return Vocabulary(
        missing=f"tokens are shown as ids: there is no {FILE} of the run's model {model} that can be read here"
    )


@functools.lru_cache(maxsize=4)
def _loaded(file: Path, _changed: int) -> Tokenizer:
    """Load a tokenizer's file, again if it `_changed` (time in ns). Raises `ValueError` if it is not a tokenizer's."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises its errors as plain exceptions
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Said:
    """The content of one call. `request` is the JSON that was sent, empty if not recorded; `text` and `tool_calls` are the
    answer's. `reply` is False if the answer is not recorded and `text` is decoded from tokens; `missing` says why."""

    request: Mapping[str, Any]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    path: str = ""
    missing: str = ""
    reply: bool = True

    @property
    def answer(self) -> str:
        """The answer and its tool calls as one text."""
        return " ".join(filter(None, [self.text, *map(str, self.tool_calls)]))


def said_by(transitions: Sequence[Transition], vocabulary: Vocabulary, parent: Parent | None = None) -> list[Said]:
    """Return the content of each call of an attempt. `transitions` must be all its calls; a branch needs its `parent`, too. For
    an exchange that cannot be read, `missing` says why."""
    try:
        read, corrupt = exchanges.read(transitions, parent), ""
    except StoreError as error:
        read, corrupt = [None] * len(transitions), str(error)
    whole = {call.id: exchange for call, exchange in zip(transitions, read, strict=True) if exchange is not None}
    return [_said(call, whole.get(call.id), corrupt, vocabulary) for call in transitions]


def _said(call: Transition, exchange: Exchange | None, corrupt: str, vocabulary: Vocabulary) -> Said:
    missing = corrupt or why_not_whole(exchange)
    request = exchange.request if exchange is not None and isinstance(exchange.request, dict) else {}
    if exchange is not None and (not missing or missing == REDACTED) and exchange.reply is not None:
        reply = _choice(exchange.reply, call.choice)
        return Said(request, text_of(reply), tool_calls_of(reply), exchange.path, missing)
    text = vocabulary.text(call.response_ids) if len(call.response_ids) else ""
    missing = missing or ("" if call.status.answered else call.error or "the agent did not get this answer whole")
    return Said(request, text, path=exchange.path if exchange else "", missing=missing, reply=False)


def _choice(reply: Any, number: int) -> Any:
    """Return the reply with only its choice `number`, or as it is for choice 0."""
    if number and isinstance(reply, dict) and len(choices := reply.get("choices") or ()) > number:
        return {**reply, "choices": [choices[number]]}
    return reply


MOST: Final = 500
"""Most messages that are returned: the first ones."""
LONGEST: Final = 20_000
"""Most characters of a text."""
PROMPTS: Final = 2_000
"""Most tokens of a prompt that are decoded if its request is not recorded: the last ones."""


@dataclass(frozen=True, slots=True)
class Line:
    """One message. `call` is the number, from 1, of the call that first sent it, or whose answer it is. `data` has arguments or
    values as JSON, by name. `missing` says why the text is not the recorded one. `made` says that the call's model wrote it:
    an assistant message without it came with the prompt."""

    role: str
    text: str
    call: int
    who: str = ""
    tag: str = ""
    data: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    made: bool = False


def conversation(
    calls: Sequence[Transition],
    said: Sequence[Said],
    states: Sequence[StepState],
    vocabulary: Vocabulary,
    rewards: Sequence[StepReward] = (),
) -> tuple[list[Line], int]:
    """Return the messages of an attempt, at most `MOST`, and how many are left out. A state stands before its call, a reward
    after it; those that belong to no call stand at the end."""
    lines: list[Line] = []
    told: dict[str, list[_Message]] = {}
    asked: dict[str, str] = {}
    waiting, given_rewards = list(states), list(rewards)
    for number, (call, one) in enumerate(zip(calls, said, strict=True), 1):
        name = call.caller.name
        for state in [each for each in waiting if each.response_id == call.id]:
            lines.append(_state(state, number))
            waiting.remove(state)
        if not call.choice:
            given = list(_sent(one.request, asked)) if one.request else _decoded(call, vocabulary)
            lines += [_line(each, number) for each in given[_shared(told.get(name, ()), given) :]]
            told[name] = given
        answer = _Message("assistant", one.text, tuple((made.name, made.arguments) for made in one.tool_calls))
        if answer.text or answer.calls or not call.status.answered:
            end = call.finish_reason if call.finish_reason not in ("stop", "") else ""
            choice = f"choice {call.choice + 1}" if call.choice else ""
            tag = ", ".join(filter(None, [str(call.status) if call.status != "ok" else "", end, choice]))
            lines.append(replace(_line(answer, number, name, tag, one.missing), made=True))
        for reward in [each for each in given_rewards if each.response_id == call.id]:
            lines.append(Line("reward", f"{reward.value:+g}: {reward.name}", number))
            given_rewards.remove(reward)
        told[name] = [*told.get(name, ()), answer]
    lines += [_note(state) for state in waiting]
    lines += [Line("reward", f"{reward.value:+g}: {reward.name}", 0, tag="of no call") for reward in given_rewards]
    return lines[:MOST], max(0, len(lines) - MOST)


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    tool: str = field(default="", compare=False)
    missing: str = field(default="", compare=False)


def _shared(known: Sequence[_Message], now: Sequence[_Message]) -> int:
    """Return how many messages at the beginning of `now` are the same as in `known`, and thus already shown."""
    differ = (place for place, (one, other) in enumerate(zip(known, now, strict=False)) if one != other)
    return next(differ, min(len(known), len(now)))


def _decoded(call: Transition, vocabulary: Vocabulary) -> list[_Message]:
    ids = call.prompt_ids[-PROMPTS:]
    if not len(ids):
        return []
    cut = f"… ({counted(len(call.prompt_ids) - len(ids), 'token')} before)\n" if len(ids) < len(call.prompt_ids) else ""
    why = "its request is not recorded: this is the whole prompt, decoded from its token ids"
    return [_Message("user", cut + vocabulary.text(ids), missing=why)]


def _sent(request: Mapping[str, Any], asked: dict[str, str]) -> Iterator[_Message]:
    """Yield the messages of a request of any of the four APIs. `asked` has the tool's name for each tool call id so far."""
    for name in ("system", "instructions"):
        if request.get(name):
            yield _Message("system", _text(request[name]))
    if (prompt := request.get("prompt")) is not None:
        yield _Message("user", prompt if isinstance(prompt, str) else _text(prompt))
    items = request.get("messages") or request.get("input") or []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        if isinstance(item, Mapping):
            yield from _item(item, asked)


def _item(item: Mapping[str, Any], asked: dict[str, str]) -> Iterator[_Message]:
    _remember(item, asked)
    role = {"developer": "system", "function": "tool"}.get(str(item.get("role")), str(item.get("role") or ""))
    if item.get("type") == "function_call_output":
        yield _Message("tool", _text(item.get("output")), tool=asked.get(str(item.get("call_id")), ""))
        return
    content = item.get("content")
    results = [part for part in content or () if _is_result(part)] if isinstance(content, list) else []
    for part in results:
        yield _Message("tool", _text(part.get("content")), tool=asked.get(str(part.get("tool_use_id")), ""))
    text, calls = said_in(item)
    made = tuple((call.name, call.arguments) for call in calls)
    if role == "tool":
        tool = str(item.get("name") or asked.get(str(item.get("tool_call_id")), ""))
        yield _Message("tool", text or _text(content), tool=tool)
    elif made or text or not results:
        others = [part for part in content if not _is_said(part)] if isinstance(content, list) else []
        more = "".join(f"\n({part.get('type', 'a part')})" for part in others if isinstance(part, Mapping))
        yield _Message(role or ("assistant" if made else "user"), text + more, made)


def _is_result(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def _is_said(part: object) -> bool:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    return kind in ("text", "input_text", "output_text", "tool_result") or kind.endswith(("_call", "tool_use"))


def _remember(item: Mapping[str, Any], asked: dict[str, str]) -> None:
    content = item.get("content")
    parts = [item, *(item.get("tool_calls") or ()), *(content if isinstance(content, list) else ())]
    for part in parts:
        if isinstance(part, Mapping):
            made = part.get("function")
            name = made.get("name") if isinstance(made, Mapping) else part.get("name")
            identity = part.get("call_id") or part.get("id")
            if name and identity:
                asked[str(identity)] = str(name)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "text" in part for part in value):
        return "".join(str(part["text"]) for part in value)
    return "" if value is None else written(value)


def _line(message: _Message, number: int, who: str = "", tag: str = "", missing: str = "") -> Line:
    data = tuple(
        (name, cut(arguments if isinstance(arguments, str) else written(arguments)))
        for name, arguments in message.calls
    )
    return Line(message.role, cut(message.text), number, who or message.tool, tag, data, missing or message.missing)


def _state(state: StepState, number: int) -> Line:
    values = state.values
    data: tuple[tuple[str, str], ...] = ()
    if isinstance(values, Mapping):
        data = tuple((str(name), cut(written(value))) for name, value in values.items())
    return Line("state", "" if data else cut(written(values)), number, state.name, data=data)


def _note(state: StepState) -> Line:
    """Return a state that no call followed: what the agent, or its grader, noted at the end."""
    values = state.values
    named = values.items() if isinstance(values, Mapping) else [("", values)]
    text = "\n".join(f"{name}: {written(value)}" if name else written(value) for name, value in named)
    return Line("note", cut(text), 0, state.name if state.name != "state" else "", "after the last call")


def written(value: Json) -> str:
    """Format a value as indented JSON; a text stays as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1, default=str)


def cut(text: str, longest: int = LONGEST) -> str:
    """Cut a text to `longest` characters, with a note of how many are missing."""
    return text if len(text) <= longest else f"{text[:longest]}\n… ({len(text) - longest} characters more)"


def one_line(value: Json, longest: int) -> str:
    """Format a value as one line of at most `longest` characters: a text as it is, anything else as JSON."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
