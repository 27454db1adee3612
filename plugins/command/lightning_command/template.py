"""Command lines with fields: `claude -p {task.input}`.

The invariant: the line is divided into arguments before its fields are filled, so that any text of a task is one argument, and
no shell reads it.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from lightning.errors import ConfigError, DataError
from lightning.types import LLM, Task

FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
SURROGATE = re.compile("[\ud800-\udfff]")
FIELDS = ("task.input", "task.id", "task.metadata", "llm.base_url", "llm.api_key", "llm.model", "folder", "project")
"""The known fields. `task.input` and `task.metadata` may be followed by keys: `{task.metadata.repository}`."""
DEEP = ("task.input.", "task.metadata.")
TASK = "{task."
"""Beginning of a word whose first character comes from the task."""
OPERATORS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1", "&>"})
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish"})
SCRIPTED = re.compile("|".join([*sorted(SHELLS), r"python[\d.]*"]))
"""Programs that take no more options after -c SCRIPT."""
LONGEST_ARGUMENT = 128 * 1024 - 1
"""The most bytes of one argument on Linux."""


def words_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Divide the command into arguments; their fields are not filled.

    Raises `ConfigError` for a command that is empty, needs a shell, or has unknown fields.
    """
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be cut into arguments: {error}") from error
    if not words or not words[0].strip() or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"the command {command!r} names no program: write it as you would type it, as a text or a list"
        )
    if FIELD.search(words[0]):
        raise ConfigError(
            f"the program {words[0]!r} has a field in its name: name the program itself, as it is found in PATH"
        )
    if isinstance(command, str) and (found := OPERATORS.intersection(words)):
        raise ConfigError(
            f"the command has {sorted(found)[0]!r}, and no shell runs it: put the line into a script and name that, or write "
            "sh -c '... \"$1\" ...' sh {task.input}"
        )
    for before, word in itertools.pairwise(words):
        if PurePath(words[0]).name in SHELLS and re.fullmatch(r"-\w*c", before) and fields_of(word):
            raise ConfigError(
                f"the field {{{fields_of(word)[0]}}} stands in the script of {words[0]} {before}, where a task could run "
                'what it likes: write "$1" there, and the field as an argument of its own: '
                f"{words[0]} {before} '... \"$1\" ...' sh {{{fields_of(word)[0]}}}"
            )
    for word in words:
        check_fields(word)
    return words


def fields_of(text: str) -> list[str]:
    """Return the names of the fields in a text, in order."""
    return [found[1] for found in FIELD.finditer(text) if found[1] is not None]


def check_fields(text: str) -> None:
    """Raise `ConfigError` for a brace that belongs to no field, and for an unknown field."""
    for found in FIELD.finditer(text):
        if found[0] in ("{{", "}}"):
            continue
        name = found[1]
        if name is None or (name not in FIELDS and not name.startswith(DEEP)):
            known = ", ".join(f"{{{field}}}" for field in FIELDS)
            close = difflib.get_close_matches(name or "", FIELDS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(
                f"{text!r} has {found[0]!r}, which is no field{hint} There are: {known}; task.input and task.metadata may go "
                "on with a key, as {task.metadata.repository}. A brace that is meant is written twice: {{ or }}"
            )


def fill(text: str, values: Mapping[str, object]) -> str:
    """Fill the fields of a text. Values that are not texts are written as JSON.

    Raises `DataError` for a key that the task does not have, and for text that cannot be an argument.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        value = _value(found[1], values)
        said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if "\0" in said or (not said.isascii() and SURROGATE.search(said)):
            raise DataError(
                f"{{{found[1]}}} has a NUL character or half of a surrogate pair, which no argument of a program can have: "
                "leave it out of the task"
            )
        return said

    return FIELD.sub(value_of, text)


def arguments_of(words: Sequence[str], values: Mapping[str, object]) -> Iterator[str]:
    """Yield the arguments of a command's words with their fields filled, without the program, which is the first word. Raises
    `DataError` as `fill` does, for an argument that is too long, and for a task's text that the program would take for an
    option."""
    program, ended = PurePath(words[0]).name, False
    for before, word in itertools.pairwise(words):
        filled = _argument(word, values)
        ended = ended or before == "--" or bool(SCRIPTED.fullmatch(program) and re.fullmatch(r"-\w*c", before))
        if filled.startswith("-") and not ended and word.startswith(TASK):
            raise DataError(
                f"the task's text {filled[:40]!r} begins with '-', and {program} would take it for an option: write -- before "
                f"{word} in the command, --option={word}, or give the text on standard input (stdin={word!r})"
            )
        yield filled


def _argument(text: str, values: Mapping[str, object]) -> str:
    filled = fill(text, values)
    if len(filled.encode()) > LONGEST_ARGUMENT:
        raise DataError(
            f"the argument {text!r} has {len(filled)} characters, more than the system takes: give it on standard input "
            "(stdin='{task.input}')"
        )
    return filled


def _value(name: str, values: Mapping[str, object]) -> object:
    if name in values:
        return values[name]
    root = next(field for field in DEEP if name.startswith(field)).removesuffix(".")
    value, seen = values[root], root
    for key in name[len(root) + 1 :].split("."):
        if not isinstance(value, Mapping) or key not in value:
            there = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else f"none: it is {value!r:.60}"
            raise DataError(f"the task has no {{{name}}}: the keys of {seen} are {there or 'none'}")
        value, seen = value[key], f"{seen}.{key}"
    return value


def values_of(task: Task, llm: LLM, model: str, folder: str, project: str) -> dict[str, object]:
    """Return the value of each field."""
    return {
        "task.input": task.input,
        "task.id": task.id,
        "task.metadata": task.metadata,
        "llm.base_url": llm.base_url,
        "llm.api_key": llm.api_key,
        "llm.model": model,
        "folder": folder,
        "project": project,
    }
