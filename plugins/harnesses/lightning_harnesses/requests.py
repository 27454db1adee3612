"""What rules read of a request, whatever API it came through: chat completions, Messages, Responses or completions.

The invariant: a request of any shape is read without an error; parts of another shape count as empty texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    messages = [*_messages(body)]
    system = [text for key in ("system", "instructions") for text in _texts(body.get(key))]
    for role, content in messages:
        if role not in SYSTEM:
            break
        system += _texts(content)
    # Messages of the system may follow the user's: Claude Code puts reminders there.
    of_user = next((content for role, content in reversed(messages) if role not in SYSTEM), "")
    last = next(reversed([*_texts(of_user)]), "")
    limit = next((body[key] for key in LIMITS if key in body), None)
    return Asked("\n".join(system), last.lstrip(), limit)


def _messages(body: Mapping[str, object]) -> Iterator[tuple[object, object]]:
    """Yield role and content of each message; the content of a message that is not the user's or the system's is empty."""
    found = next((body[key] for key in ("messages", "input", "prompt") if key in body), None)
    if isinstance(found, str):
        yield "user", found
    for item in found if isinstance(found, list) else ():
        if isinstance(item, Mapping):
            role = item.get("role")
            yield role, item.get("content") if role in ("user", *SYSTEM) else ""


def _texts(content: object) -> Iterator[str]:
    """Yield the texts of a message's content: the content itself, or the texts of its parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            yield text
