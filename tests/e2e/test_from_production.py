"""The page that leads from an agent in production to a better one, carried out: its files, its commands, with SmolLM2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lightning_examples import smollm2

from tests.house.test_docs_run import program

PAGE = "docs/from-production.md"
ROOT = Path(__file__).parents[2]
SHORTER = {"--steps 8": "--steps 1", "--tasks-per-step 8": "--tasks-per-step 2", "group_size=8": "group_size=4"}
QUESTION = "Jon has 36 shells and buys 4 bags of 25 more. How many shells does Jon have now?\n"


def commands() -> Iterator[str]:
    """The page's `lightning` commands, each on one line and without its comment."""
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / PAGE).read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("lightning "):
                yield line.partition("  #")[0].strip()


def one(words: str) -> str:
    """The page's only command with these words, with fewer steps."""
    (found,) = (each for each in commands() if words in each)
    for old, new in SHORTER.items():
        found = found.replace(old, new)
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_step_of_the_page_runs(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "MODEL": str(smollm2.model_folder())}

    def shell(command: str) -> str:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ran = subprocess.run(command, shell=True, cwd=tmp_path, text=True, env=env, check=False, **both)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}"
        return str(ran.stdout)

    (tmp_path / "blocks.py").write_text(program(PAGE, tmp_path, ""))
    shell("python blocks.py")
    for name, few in (("train.jsonl", 16), ("val.jsonl", 8)):
        (tmp_path / name).write_text("".join((tmp_path / name).read_text().splitlines(keepends=True)[:few]))
    assert "support/solve" in shell(one("--dev"))
    assert "held-out after 1 step" in shell(one("--out runs/support"))
    shell("lightning runs runs/support")
    assert "is version 1" in shell(one("weights@1 --alias live"))
    answered = served(one("lightning serve"), tmp_path, env)
    assert answered.startswith("question: "), answered
    assert re.search(r"\blive\b", shell(one("resources compare")))


def served(command: str, folder: Path, env: Mapping[str, str]) -> str:
    """What the agent in production prints, answered by the model that the command serves."""
    with subprocess.Popen(
        command.replace("8080", "0"), shell=True, cwd=folder, env=dict(env), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            told = dict(re.findall(r"^export (\w+)=(\S+)$", _until(server.stdout, "model: "), re.MULTILINE))
            ran = subprocess.run(
                [sys.executable, "support.py"],
                cwd=folder,
                input=QUESTION,
                capture_output=True,
                text=True,
                check=True,
                env={**env, **told, "MODEL": "policy"},
            )
            return ran.stdout
        finally:
            server.terminate()


def _until(lines: Iterator[str], words: str) -> str:
    said = []
    for line in lines:
        said.append(line)
        if line.startswith(words):
            return "".join(said)
    raise AssertionError("".join(said))
