"""Every `pip install` that is printed or written down installs this lightning, and what it asks for can be had."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest
from lightning.installation import CPU_INDEX, install_command

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [
    path
    for place in ("*.md", "docs/**/*.md", "examples/**/*.md", "adapters/**/*.md", "plugins/**/*.md")
    for path in sorted(ROOT.glob(place))
    if path.name != "CHANGELOG.md"  # what was true when it was written
]
SOURCES = [
    path
    for place in ("core", "plugins", "adapters", "examples")
    for path in sorted((ROOT / place).rglob("*"))
    if path.suffix in (".py", ".j2", ".toml", ".yaml", ".sh") and path.name != "installation.py"
]
OURS = re.compile(r"""(?:^|[\s'"/])lightning(?:\[[\w,-]+\])?(?:[<>=~!]|['"]|$)""")
TAKES_A_VALUE = ("--find-links", "--extra-index-url", "-c", "-r", "--target", "--dest", "--wheel-dir")


def commands(text: str) -> Iterator[str]:
    """What follows `pip install` in a text, each up to its end."""
    for line in text.splitlines():
        for found in re.finditer(r"\bpip install ([^`#&|]*)", line):
            yield found[1].partition(", ")[0].strip().rstrip("),")


def written() -> Iterator[tuple[str, list[str]]]:
    """The words of every command of the pages that installs lightning."""
    for page in PAGES:
        for command in commands(page.read_text()):
            words = shlex.split(command)
            if "-e" in words or any(OURS.search(word) for word in words):
                yield f"{page.relative_to(ROOT)}: pip install {command}", words


@cache
def wanted(words: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The extras of lightning and the other requirements of a command. Raises `ValueError` for what an index would answer."""
    extras: set[str] = set()
    others: list[str] = []
    rest, folder = list(words), ""
    while rest:
        word = rest.pop(0)
        value = rest.pop(0) if word in (*TAKES_A_VALUE, "-e") else ""
        matched = re.fullmatch(r"([^\[]*)(?:\[([\w,-]+)\])?(<1)?", value if word == "-e" else word)
        if word == "--find-links":
            folder = value
        elif word == "-e":
            path, found, _ = matched.groups() if matched else ("", "", "")
            if path == "." or "lightning" in path or path == "../..":
                extras |= set((found or "").split(",")) - {"", "test"}
        elif word.startswith("-"):
            continue
        elif matched and matched[1] == "lightning":
            if not folder or not matched[3]:
                raise ValueError("the index's lightning is PyTorch Lightning")
            extras |= set((matched[2] or "").split(",")) - {""}
        else:
            others.append(word)
    return frozenset(extras), tuple(others)


def test_pages_install_from_the_checkout_or_a_wheel() -> None:
    found = list(written())
    assert len(found) > 30
    for where, words in found:
        try:
            extras, _ = wanted(tuple(words))
        except ValueError as error:
            raise AssertionError(f"{where}: {error}") from error
        assert extras <= EXTRAS.keys(), where
        assert (CPU_INDEX in words) == (CPU_INDEX in install_command(",".join(sorted(extras)))), where


@pytest.mark.parametrize(
    "words", ["lightning[torch]", "lightning[torch]<1", "lightning", "--find-links dist lightning"]
)
def test_what_an_index_would_answer_is_seen(words: str) -> None:
    with pytest.raises(ValueError, match="PyTorch Lightning"):
        wanted(tuple(words.split()))


def texts(path: Path) -> Iterator[str]:
    """The texts of a source that may be printed."""
    if path.suffix != ".py":
        yield path.read_text()
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_source_spells_the_command_itself() -> None:
    """`lightning.installation` says how lightning is installed here."""
    found = [
        f"{path.relative_to(ROOT)}: pip install {command}"
        for path in SOURCES
        if "pip install" in (text := path.read_text()) or "pip download" in text
        for line in texts(path)
        for command in commands(line.replace("pip download", "pip install").replace("pip install -U", "pip install"))
        if OURS.search(command)
    ]
    assert found == []


def asked() -> Iterator[tuple[str, str]]:
    """Every extra that a source names where it asks for the command."""
    for path in SOURCES:
        if path.suffix == ".py" and ("MissingExtra" in (text := path.read_text()) or "install_command(" in text):
            for node in ast.walk(ast.parse(text)):
                name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
                if name in ("MissingExtraError", "install_command", "import_extra") and node.args:  # type: ignore[attr-defined]
                    first = node.args[0]  # type: ignore[attr-defined]
                    if isinstance(first, ast.Constant):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", str(first.value)  # type: ignore[attr-defined]


def test_every_extra_that_is_asked_for_exists() -> None:
    found = list(asked())
    assert {extra for _, extra in found} > {"torch", "verl", "console", "vllm"}
    assert [(where, extra) for where, extra in found if extra not in {*EXTRAS, "EXTRA"}] == []


def test_an_extra_that_refers_to_lightning_is_resolved_to_this_one() -> None:
    """`lightning[torch]` in an extra means the project itself: with a bound, or from an index, it would be the other one."""
    for extra, requirements in EXTRAS.items():
        for one in requirements:
            if re.match(r"lightning\b(?!_|-)", one):
                assert re.fullmatch(r"lightning\[[\w,-]+\]", one), (extra, one)


# by the index ---------------------------------------------------------------------------------------------------


ELSEWHERE = {"crewai", "dspy", "llama-index", "smolagents", "otel"}
"""What the environment of `requirements/frameworks.txt` can have."""
ALONE = {"vllm"}
"""For CUDA, beside which the CPU's build cannot be."""


def resolve(
    extras: Collection[str], others: Collection[str] = (), *options: str, own: str = f" @ {ROOT.as_uri()}"
) -> str:
    """What uv would install."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-", *options]
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    for place in folders:  # where the CPU build of torch may be; elsewhere the command names the index that has it
        command += ["--find-links", place]
    command += ["--python-version", "3.11", *(() if folders else ("--extra-index-url", CPU_INDEX))]
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    text = "\n".join([f"lightning[{','.join(sorted(extras))}]{own}", *sorted(others)])
    ran = subprocess.run(command, cwd=ROOT, env=env, input=text, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{text}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_can_be_carried_out() -> None:
    """What is written for one environment, at once: what resolves together resolves alone."""
    every = [wanted(tuple(words)) for _, words in written()] + [(frozenset({extra}), ()) for extra in EXTRAS]
    main, elsewhere, rest = set[str](), set[str](ELSEWHERE), list[tuple[frozenset[str], tuple[str, ...]]]()
    others: set[str] = set()
    for extras, more in every:
        if extras & ALONE:
            rest.append((extras, more))
        elif extras <= ELSEWHERE:
            others |= set(more)
        else:
            assert not more, (extras, more)
            main |= extras - ELSEWHERE
    known = [resolve(main | {"otel"}, (), "-c", "requirements/constraints.txt")]
    known += [resolve(elsewhere, others, "-c", "requirements/frameworks.txt")]
    known += [resolve(extras, more) for extras, more in sorted(set(rest), key=str)]
    for text in known:
        assert re.search(r"^lightning @ file://", text, re.MULTILINE), text
