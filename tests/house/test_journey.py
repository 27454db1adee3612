"""The first journey of docs/architecture.md is the one that a model call takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.house.goldens import UPDATE, golden
from tests.house.journey import rooms

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def test_a_model_call_enters_the_modules_that_the_page_names() -> None:
    """In a process of its own: what is traced is slow, and threads that began before are not heard."""
    command = [sys.executable, str(ROOT / "tests" / "house" / "journey.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    entered = re.findall(r"^ *\d+ (\S+)$", ran.stdout, re.MULTILINE)
    golden("journey.txt", "".join(f"{room} {count}\n" for room, count in rooms(entered).items()))
    page = PAGE.read_text()
    table = page.partition("**A model call")[2].partition("**A rollout")[0].partition("|---|---|---|\n")[2]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([\w/]+)`", row.split("|")[2] if "|" in row else "")
    }
    core = ROOT / "core" / "lightning"
    found = {
        next(p for p in (name, f"gateway/{name}", f"store/{name}") if (core / f"{p}.py").is_file()) for name in named
    }
    assert found - set(entered) == set()
    counted = re.sub(r"(?<=\n\| a model call \| )\d+", str(len(entered)), page)
    if UPDATE:
        PAGE.write_text(counted)
    assert page == counted or UPDATE, "run `make golden`, and name the new files in the table"
