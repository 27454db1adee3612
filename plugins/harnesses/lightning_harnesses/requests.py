"""What rules read of a request, whatever API it came through: chat completions, Messages, Responses or completions.

The invariant: a request of any shape is read without an error; parts of another shape count as empty texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

SYSTEM = ("system", "developer")
"""The roles of messages that are part of the system prompt, if they stand before all others."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields with the limit of an answer's tokens in the APIs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The system prompt, the last text of the user without spaces before it, and the limit of tokens (None: none given)."""

    system: str
    last: str
    max_tokens: object


def read(body: Mapping[str, object]) -> Asked:
    """Return what rules read of a request's body."""
    messages = _messages(body)
    system = [text for key in ("system", "instructions") for text in _texts(body.get(key))]
    for message in takewhile(_is_system, messages):
        system += _texts(message.get("content"))
    # Messages of the system may follow the user's: Claude Code puts reminders there.
    last = next(dropwhile(_is_system, reversed(messages)), None)
    texts = [*_texts(last.get("content"))] if isinstance(last, Mapping) and last.get("role") == "user" else []
    limit = next((body[key] for key in LIMITS if key in body), None)
    return Asked("\n".join(system), texts[-1].lstrip() if texts else "", limit)


def _messages(body: Mapping[str, object]) -> Sequence[Any]:
    """Return the messages of a request, as they are: there may be thousands, of which few are looked at."""
    found = next((body[key] for key in ("messages", "input", "prompt") if key in body), None)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return found if isinstance(found, list) else ()


def _is_system(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") in SYSTEM


def _texts(content: object) -> Iterator[str]:
    """Yield the texts of a message's content: the content itself, or the texts of its parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            yield text
