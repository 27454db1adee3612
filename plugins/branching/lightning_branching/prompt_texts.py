"""Helpers for prompts that replace an agent's own: read them from files, and find their texts in the agent's requests."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.cli.output import warn
from lightning.errors import DataError
from lightning.instrument.components import declared_prompts
from lightning.safe_text import read_text


def warn_of_name(name: str, then: str) -> None:
    """Warn if the agent's module makes components with prompts, but none called `name`. The agent may still make it later;
    `then` ends the warning and says when that shows."""
    known = sorted(declared_prompts())
    if known and name not in known:
        warn(f"the agent's module has a prompt for {', '.join(known)}, and none for {name!r}: {then}")


def read_prompt(file: Path) -> str:
    """Read a prompt from a file. Raises `DataError` if the file cannot be read."""
    try:
        return read_text(file, DataError)
    except OSError as error:
        raise DataError(f"cannot read the prompt: {error}") from error


def longest_literal(template: str) -> str:
    """Return the longest part of a template without fields, which is the same in each text that is made from the template."""
    try:
        parts = [literal for literal, *_ in string.Formatter().parse(template)]
    except ValueError:  # braces that are no fields: the text is no template
        parts = [template]
    return max(parts, key=len, default=template)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
