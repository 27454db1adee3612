"""Every `lightning ...` that is written down or printed is a command line that the real parser takes: its command, sub-command,
options and values exist.

Looked at are code blocks and inline spans of the pages, and in the sources texts that have such a span or begin with
`lightning COMMAND`, the lists of words that `next_steps` prints, and those that begin with "lightning". A placeholder in
capitals or braces stands for any value. A command line in a code block, or of words, must be complete; an inline span may name
a command or an option alone.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer.main
from lightning.cli.app import COMMANDS, build
from lightning.config.fields import find
from lightning.plugins import plugins

from tests.house.test_install_commands import PAGES, ROOT, SOURCES, texts

SPAN = re.compile(r"`(lightning [a-z][^`]*)`")
AFTER_COLON = re.compile(r": (?:[A-Z_]+=\S+ )*(lightning [a-z][^`();|]*)")
BEGINS = re.compile(r"\s*(?:[A-Z_]+=\S+ )*lightning [a-z]")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(?![a-z])|[{}$*]|\.\.\.|…")
GLOBAL = ("--debug", "--log-level", "--version", "--help", "-h")


@cache
def command(name: str) -> Any:
    """The command of a name, as typer makes it."""
    return typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]


def check(line: str, *, whole: bool) -> str:
    """What is wrong with a command line, or nothing."""
    try:
        words = shlex.split(re.sub(r"\s#.*", "", line))
    except ValueError as error:
        return str(error)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    words = words[: next((place for place, word in enumerate(words) if word in (">", "|", "||", "&&", "&", ";")), None)]
    left_out = [place for place, word in enumerate(words) if word == "..." and not words[place - 1].startswith("--")]
    words, whole = [word for place, word in enumerate(words) if place not in left_out], whole and not left_out
    name, *rest = words[1:] or ["..."]
    if name in GLOBAL or PLACEHOLDER.match(name):
        return ""
    if name not in COMMANDS and name not in plugins().names("commands"):
        return f"there is no command {name!r}"
    return parsed(command(name), [word for word in rest if word not in GLOBAL], whole=whole and rest != ["--help"])


def parsed(found: Any, words: list[str], *, whole: bool) -> str:
    """What the parser of a command says of its words, or nothing."""
    context = found.make_context(found.name, [], resilient_parsing=True)
    context.resilient_parsing = False  # or unknown options would be passed over
    try:
        values, left, _ = found.make_parser(context).parse_args([*words])
    except Exception as error:  # typer's own copy of click raises classes that it does not export
        said = str(getattr(error, "message", error))
        return "" if said.endswith("requires an argument.") and not whole else said
    if hasattr(found, "commands"):
        if not left or PLACEHOLDER.fullmatch(left[0]):
            return ""
        try:
            _, inner, rest = found.resolve_command(context, left)
        except Exception as error:  # as above
            return str(getattr(error, "message", error))
        return parsed(inner, rest, whole=whole)
    if left:
        return f"got unexpected words {left}"
    for parameter in found.params:
        given = values.get(parameter.name)
        if given in (None, (), [], "") or not isinstance(given, (str, list, tuple, bool, int)):
            if whole and parameter.required:
                return f"{parameter.opts[0]} is missing"
            continue
        shown = [str(value) for value in (given if isinstance(given, (list, tuple)) else [given])]
        if parameter.name == "set_" and found.name != "branch" and (unknown := unknown_setting(shown)):
            return unknown
        if agent := next((value for value in shown if ".py:" in value), ""):
            return f"{agent}: an agent is MODULE:FUNCTION, without .py"
        if not any(map(PLACEHOLDER.search, shown)):
            try:
                parameter.process_value(context, given)
            except Exception as error:  # as above
                return str(getattr(error, "message", error))
    return ""


def unknown_setting(given: list[str]) -> str:
    """The first of `KEY=VALUE` whose key is no setting, as an error says it, or nothing."""
    for key in (one.partition("=")[0] for one in given):
        if not PLACEHOLDER.search(key) and find(key) is None:
            return f"there is no setting {key!r}"
    return ""


def in_pages() -> Iterator[tuple[str, str, bool]]:
    """The command lines of the pages: where, the line, and whether it must be complete."""
    for page in PAGES:
        where, fenced, lines = str(page.relative_to(ROOT)), "", page.read_text().splitlines()
        kept = ""
        for line in lines:
            if line.lstrip().startswith("```"):
                fenced = "" if fenced else line.strip().removeprefix("```") or "text"
                continue
            if fenced:
                shown = kept + line.lstrip().removeprefix("$ ").removeprefix(".venv/bin/")
                kept = shown[:-1] if shown.endswith("\\") else ""
                if not kept and fenced in ("console", "bash", "sh", "shell") and BEGINS.match(shown):
                    yield where, shown, True
            else:
                for found in SPAN.finditer(line):
                    yield where, found[1], False


def in_sources() -> Iterator[tuple[str, str, bool]]:
    """The command lines in the texts of the sources."""
    for path in SOURCES:
        if path.suffix == ".py" and "lightning " in path.read_text():
            for text in texts(path):
                plain = " ".join(text.split())
                for found in (*SPAN.finditer(plain), *AFTER_COLON.finditer(plain)):
                    yield str(path.relative_to(ROOT)), found[1], False
                if re.match(r"lightning [a-z]+ [^ ]*[-{/A-Z]", text) and "\n" not in text:
                    yield str(path.relative_to(ROOT)), text, False


def of_words() -> Iterator[tuple[str, str, bool]]:
    """The command lines that sources make of words; a word that is not written there stands as a placeholder."""
    for path in SOURCES:
        if path.suffix == ".py" and ("next_steps(" in (text := path.read_text()) or '["lightning", ' in text):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "next_steps":
                    steps = [one for one in ast.walk(node) if isinstance(one, ast.Tuple) and len(one.elts) == 2]
                    lists = [one.elts[1] for one in steps]
                    assert all(isinstance(one, ast.List) for one in lists), (
                        f"{path}:{node.lineno}: write the words there"
                    )
                elif isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "'lightning'":
                    lists = [ast.List(node.elts[1:])]
                else:
                    continue
                for one in lists:
                    whole, words = isinstance(node, ast.Call), ["lightning"]
                    for word in one.elts:  # type: ignore[attr-defined]
                        named = not isinstance(word, ast.Starred) or ast.unparse(word).startswith(
                            ("*run_words(", "*named")
                        )
                        words += [str(word.value) if isinstance(word, ast.Constant) else "WORD"] * named
                        whole = whole and named
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(words), whole


def test_written_commands_are_taken_by_the_parser() -> None:
    found = [*in_pages(), *in_sources(), *of_words()]
    assert len(found) > 700
    wrong = [
        f"{where}: {line}: {why}" for where, line, whole in dict.fromkeys(found) if (why := check(line, whole=whole))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lightning bogus", "there is no command 'bogus'"),
        ("lightning train --tsaks x", "--tsaks"),
        ("lightning train a.py:solve --model m", "without .py"),
        ("lightning train a:b --model m --set engine.foo=1", "no setting 'engine.foo'"),
        ("lightning train a:b --tasks t.jsonl", "--model is missing"),
        ("lightning runs show one two", "two"),
        ("lightning demo --steps three", "valid integer"),
        ("lightning db vacuum PLACE", "vacuum"),
        ("lightning runs compare --runs PLACE > file.txt", ""),
        ("lightning train ... --dev   # a dry run", ""),
    ],
)
def test_what_the_parser_would_refuse_is_seen(line: str, said: str) -> None:
    found = check(line, whole=True)
    assert (said in found) if said else (found == "")
