"""Prompts that are tried in the place of an agent's own: their files, and whether the agent's requests had them."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.cli.output import warn
from lightning.errors import DataError
from lightning.instrument.components import declared_prompts
from lightning.text_files import read_text


def warn_of_name(name: str, then: str) -> None:
    """Warn that the agent's module makes other components. It may still make this one later; `then` says what tells."""
    known = sorted(declared_prompts())
    if known and name not in known:
        warn(f"the agent's module has a prompt for {', '.join(known)}, and none for {name!r}: {then}")


def read_prompt(file: Path) -> str:
    """A prompt's text. Raises `DataError`."""
    try:
        return read_text(file, DataError)
    except OSError as error:
        raise DataError(f"cannot read the prompt: {error}") from error


def longest_literal(template: str) -> str:
    """The longest part of a template that stays as it is when its fields are filled in."""
    try:
        parts = [literal for literal, *_ in string.Formatter().parse(template)]
    except ValueError:  # no template, but a text with braces
        parts = [template]
    return max(parts, key=len, default=template)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
