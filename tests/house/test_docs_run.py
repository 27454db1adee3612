"""The Python blocks of the documentation run.

The blocks of a file are one program, run as a script in an empty folder. An HTML comment on the line before a block
changes that:
`<!-- test: skip (reason) -->` leaves it out, `<!-- test: slow -->` runs it (with all before it) among the slow tests only,
`<!-- test: slow, THIS as THAT -->` with that in the place of this (and more such pairs): a training of fewer steps is the same
program,
`<!-- test: elsewhere -->` runs it (with those marked so before it) where the frameworks are that cannot live beside the others,
`<!-- test: file NAME -->` writes it to the file NAME beside the script instead of running it, whatever language it is in.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning_examples.raw_python import MODEL

ROOT = Path(__file__).parents[2]
FILES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("**/*.md")),
]
BLOCK = re.compile(
    r"^(?:<!-- test: (?P<mark>[^\n]+?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
LONG = ("docs/algorithms.md", "docs/frameworks/plain-python.md", "docs/gateway.md", "docs/index.md")
"""Files whose blocks take seconds: they train, or import a framework. They run among the slow tests."""
SHARED = ("docs/your-own-loop.md",)
"""Files whose programs train `MODEL` several times. All trainings attach to one vLLM: a start costs more than any of them."""
MARK = re.compile(r"skip \(.+\)|slow(?:, \S+ as \S+)*|elsewhere|file [\w./-]+")
CHANGE = re.compile(r", (\S+) as (\S+?)(?=, |$)")


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    mark: str

    def runs(self, among: str) -> bool:
        """Whether it is part of the program that runs among the tests of this kind."""
        kind = self.mark.partition(",")[0]
        return kind == among or (kind == "" and among != "elsewhere")

    @property
    def source(self) -> str:
        """What runs."""
        source = self.code
        for old, new in CHANGE.findall(self.mark):
            assert self.code.count(old) == 1, f"line {self.line}: {old} is to be there once"
            source = source.replace(old, new)
        return source


def blocks(name: str) -> list[Block]:
    text = (ROOT / name).read_text()
    return [
        Block(text[: match.start("code")].count("\n") + 1, match["code"], match["mark"] or "")
        for match in BLOCK.finditer(text)
        if match["language"] == "python" or (match["mark"] or "").startswith("file ")
    ]


def program(name: str, folder: Path, among: str) -> str:
    """The script of a file; blocks that are files are written into the folder."""
    parts = []
    for block in blocks(name):
        if block.mark.startswith("file "):
            (folder / block.mark.removeprefix("file ")).write_text(block.code)
        elif block.runs(among):
            parts.append(f"# {name}, line {block.line}\n{block.source}")
    return "\n".join(parts)


def files_with(mark: str) -> list[str]:
    """The files that have a block with this mark."""
    return [name for name in FILES if any(block.mark.partition(",")[0] == mark for block in blocks(name))]


def run(name: str, folder: Path, among: str = "", env: Mapping[str, str] | None = None) -> None:
    script = folder / "blocks.py"
    script.write_text(program(name, folder, among))
    ran = subprocess.run([sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{script.read_text()}\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in files_with("")],
)
def test_blocks_run(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@contextmanager
def one_vllm(folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a program whose trainings attach to a vLLM with `MODEL`, which runs meanwhile."""
    vllm = OwnedVLLM(MODEL, PolicyServerConfig(device="cpu"), log=folder / "vllm.log")
    asyncio.run(vllm.start())
    try:
        yield {**os.environ, "LIGHTNING_POLICY_SERVER__ATTACH": vllm.url}
    finally:
        asyncio.run(vllm.close())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in files_with("slow") if name not in SHARED])
def test_slow_blocks_run(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, "slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SHARED)
def test_slow_blocks_run_with_one_vllm(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with one_vllm(tmp_path_factory.mktemp("vllm")) as env:
        run(name, tmp_path, "slow", env)


@pytest.mark.parametrize("name", FILES)
def test_marks_are_known(name: str) -> None:
    for block in blocks(name):
        assert not block.mark or MARK.fullmatch(block.mark), f"{name}, line {block.line}: {block.mark}"
    comments = (ROOT / name).read_text().count("<!-- test:")
    assert comments == sum(bool(block.mark) for block in blocks(name)), (
        f"{name}: a test comment is not right before a block"
    )
