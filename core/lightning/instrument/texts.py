"""Conversion of values from the user's code to bounded text, JSON and numbers, for reports and rewards.

The invariant: no object of the user, however odd (its `__repr__` or `__float__` raises, it contains itself, it is a gigabyte),
causes an exception here, but for the `DataError` of `number`, or a text beyond the limits below.
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
"""The largest number of characters of a name, of a tool's output, of its error, and of one argument."""

MAX_RESULT = 1024 * 1024
"""The largest number of characters of the JSON of a tool's returned value; longer JSON is not kept."""
MAX_STATE = 4096
"""The largest number of characters of the JSON of a state."""

MAX_REWARD = 1e12
"""The largest absolute reward. Gradients are float32 (up to 3.4e38) and their norm is a sum of squares, so sums of rewards over
a rollout's calls, times the gradients of a model's logprobs, must stay far below 1e19."""

CURE = "return the reward as a finite number, or as a dict of them such as {'reward': 1.0, 'format': 0.5}"


def number(value: object, what: str, cure: str = CURE) -> float:
    """Return a Python, numpy or 0-d tensor number as a float. Raises `DataError`, naming `what` it is and the `cure`, for any
    other type, for NaN and for a number beyond ±`MAX_REWARD`."""
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
    """Return a text, shortened to `MAX_TEXT` characters."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def text_of(value: object) -> str:
    """Return a value as a text of at most `MAX_TEXT` characters: a text itself, the items of a list of texts joined, "" for
    None, else the value's `repr`."""
    if value is None:
        return ""
    try:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return clip("".join(value))
        return clip(str.__str__(value) if isinstance(value, str) else repr(value))
    except Exception:  # noqa: BLE001 — isolates the user's __repr__
        return f"<{type(value).__name__}>"


def error_text(error: BaseException) -> str:
    """Return an exception as `KeyError: 'k'`; only the name of its class if its `str` raises."""
    name = type(error).__name__
    try:
        return clip(f"{name}: {error}")
    except Exception:  # noqa: BLE001 — isolates the user's __str__
        return name


def json_of(value: object) -> Json:
    """Return a copy of a value as JSON; as text (`text_of`) if it is too long or not JSON."""
    try:
        text = json.dumps(value, allow_nan=False)
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return text_of(value)
    return cast("Json", json.loads(text)) if len(text) <= MAX_TEXT else text_of(value)


def result_of(value: object) -> tuple[str, bool]:
    """Return a tool's returned value as JSON text, and whether that is incomplete: not JSON, changed by JSON, or too long. A
    text that `text_of` keeps whole gives "" and False."""
    if isinstance(value, str) and type(value) is str and len(value) <= MAX_TEXT:
        return "", False
    try:
        text = json.dumps(value, allow_nan=False)
        same = json.loads(text) == value
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return "", True
    return (text, not same) if len(text) <= MAX_RESULT else ("", True)


def state_of(values: object) -> Json:
    """Return a state as JSON, with text in the place of values that JSON cannot hold; if it is longer than `MAX_STATE`, one
    shortened text."""
    text = ""
    try:
        for part in _STATES.iterencode(values):  # piece by piece, so that a large state is not encoded whole
            text += part
            if len(text) > MAX_STATE:
                return text[: MAX_STATE - 1] + "…"
        return cast("Json", json.loads(text, parse_constant=str))
    except Exception:  # noqa: BLE001 — isolates the user's classes
        return text_of(values)


_STATES = json.JSONEncoder(default=text_of)


def arguments_of(value: object) -> Json:
    """Return a tool's arguments as JSON. Each named argument is shortened by itself."""
    if not isinstance(value, Mapping):
        return json_of(value)
    try:
        return {text_of(name): json_of(item) for name, item in value.items()}
    except Exception:  # noqa: BLE001 — isolates the user's mapping
        return text_of(value)


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature of a function; None if Python cannot determine it."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def named_arguments(signature: inspect.Signature | None, args: tuple[object, ...], kwargs: dict[str, object]) -> Json:
    """Return a call's arguments by name, as JSON, without `self`. If they do not fit the signature, positional arguments are
    named by their index."""
    named: dict[str, object] = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    if signature is not None:
        with suppress(TypeError):
            named = dict(signature.bind(*args, **kwargs).arguments)
    named.pop("self", None)
    return arguments_of(named)


def caller_of(caller: Caller) -> Caller:
    """Return a caller with its texts shortened to `MAX_TEXT` characters each."""
    return Caller(
        agent=text_of(caller.agent),
        path=tuple(text_of(name) for name in caller.path),
        span_id=text_of(caller.span_id),
        parent_id=text_of(caller.parent_id),
        framework=text_of(caller.framework),
    )


def size_of(report: ToolEvent | StepReward | StepState | Caller) -> int:
    """Return about how many characters a report takes in a message."""
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
    """Return the type and the text of a value, at most 200 characters, for messages."""
    if value is None:
        return "None"
    text = f"{type(value).__name__} {text_of(value)}" if not isinstance(value, str) else f"str {value[:200]!r}"
    return text if len(text) <= 200 else text[:199] + "…"
