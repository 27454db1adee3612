"""Values of the user's code as bounded text, JSON and numbers, for reports and rewards.

The invariant: no object of the user, however odd (its `__repr__` raises, its `__float__` raises, it contains itself, it is
a gigabyte), gets an exception or more than `MAX_TEXT` characters through here; only `number` raises, and only `DataError`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from lightning.errors import DataError
from lightning.types import Caller, Json, StepReward, StepState, ToolEvent

MAX_TEXT = 4096
"""Characters kept of a name, of a tool's output, of its error and of an argument."""

MAX_RESULT = 1024 * 1024
"""Characters of the JSON of what a tool returned that are kept."""
MAX_STATE = 4096
"""Characters of the JSON of a state that are kept."""

MAX_REWARD = 1e12
"""The largest reward, either way. Gradients are float32 (up to 3.4e38) and their norm is a sum of squares, so what is made of
rewards must stay far below 1e19: sums over a rollout's calls, and times the gradients of a model's logprobs."""

CURE = "return the reward as a finite number, or as a dict of them such as {'reward': 1.0, 'format': 0.5}"


def number(value: object, what: str, cure: str = CURE) -> float:
    """A Python, numpy or 0-d tensor number as a float. Raises `DataError` for anything else, NaN and beyond `MAX_REWARD`."""
    if isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__"):
        raise DataError(f"{what} is {_short(value)}, not a number: {cure}")
    try:
        result = float(cast("float", value))
    except Exception as error:
        raise DataError(f"{what} is {_short(value)}, not a number ({error_text(error)}): {cure}") from error
    if not abs(result) <= MAX_REWARD:
        raise DataError(
            f"{what} is {result}, which cannot be trained on: {cure}, between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        )
    return result


def clip(text: str) -> str:
    """At most `MAX_TEXT` characters of a text."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def text_of(value: object) -> str:
    """A value in words: itself if it is a text, the whole of a list of texts, else its `repr`; nothing for None."""
    if value is None:
        return ""
    try:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return clip("".join(value))
        return clip(str.__str__(value) if isinstance(value, str) else repr(value))
    except Exception:  # noqa: BLE001 — isolates the user's __repr__
        return f"<{type(value).__name__}>"


def error_text(error: BaseException) -> str:
    """`KeyError: 'k'`; only the name of an exception that cannot be put in words."""
    name = type(error).__name__
    try:
        return clip(f"{name}: {error}")
    except Exception:  # noqa: BLE001 — isolates the user's __str__
        return name


def json_of(value: object) -> Json:
    """A copy of a value as JSON; the text of what is too long or what JSON cannot say."""
    try:
        text = json.dumps(value, allow_nan=False)
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return text_of(value)
    return cast("Json", json.loads(text)) if len(text) <= MAX_TEXT else text_of(value)


def result_of(value: object) -> tuple[str, bool]:
    """What a tool returned as JSON text, and whether that is incomplete. Of a text that `text_of` keeps whole there is none."""
    if isinstance(value, str) and type(value) is str and len(value) <= MAX_TEXT:
        return "", False
    try:
        text = json.dumps(value, allow_nan=False)
        same = json.loads(text) == value
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return "", True
    return (text, not same) if len(text) <= MAX_RESULT else ("", True)


def state_of(values: object) -> Json:
    """A state as JSON: values that JSON cannot say in words, and one text, cut, where all are too long."""
    text = ""
    try:
        for part in _STATES.iterencode(values):  # no more of a large state than is kept
            text += part
            if len(text) > MAX_STATE:
                return text[: MAX_STATE - 1] + "…"
        return cast("Json", json.loads(text, parse_constant=str))
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return text_of(values)


_STATES = json.JSONEncoder(default=text_of)


def arguments_of(value: object) -> Json:
    """A tool's arguments as JSON; each one that has a name is bounded by itself."""
    if not isinstance(value, Mapping):
        return json_of(value)
    try:
        return {text_of(name): json_of(item) for name, item in value.items()}
    except Exception:  # noqa: BLE001 — isolates the user's mapping
        return text_of(value)


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """The parameters of a function; None where Python does not know them."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def named_arguments(signature: inspect.Signature | None, args: tuple[object, ...], kwargs: dict[str, object]) -> Json:
    """A call's arguments by name, as JSON. Those that do not fit the signature have their places for names."""
    named: dict[str, object] = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    if signature is not None:
        with suppress(TypeError):
            named = dict(signature.bind(*args, **kwargs).arguments)
    named.pop("self", None)
    return arguments_of(named)


def caller_of(caller: Caller) -> Caller:
    """A caller of bounded texts."""
    return Caller(
        agent=text_of(caller.agent),
        path=tuple(text_of(name) for name in caller.path),
        span_id=text_of(caller.span_id),
        parent_id=text_of(caller.parent_id),
        framework=text_of(caller.framework),
    )


def size_of(report: ToolEvent | StepReward | StepState | Caller) -> int:
    """About how many characters a report takes up in a message."""
    match report:
        case ToolEvent():
            texts = (report.name, report.status, report.call_id, report.output, report.error, report.response_id)
            caller = 0 if report.caller is None else size_of(report.caller)
            return sum(map(len, texts)) + len(json.dumps(report.arguments)) + caller + len(report.result)
        case StepState():
            return len(report.name) + len(report.response_id) + len(json.dumps(report.values))
        case StepReward():
            return len(report.name) + len(report.response_id)
        case Caller():
            names = (report.agent, *report.path, report.span_id, report.parent_id, report.framework)
            return sum(map(len, names))


def _short(value: object) -> str:
    """A value in a message."""
    if value is None:
        return "None"
    text = f"{type(value).__name__} {text_of(value)}" if not isinstance(value, str) else f"str {value[:200]!r}"
    return text if len(text) <= 200 else text[:199] + "…"
