"""What a console costs beside a run that goes on: CPU-seconds of its process per second, with a page open and with none.

A demo trains with a console beside it; a browser has the run's page open for half of the time. The page looks again every two
seconds, and at most a tenth of the time that an answer takes.

    python tests/bench/bench_console_live.py [--json FILE] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.plugins.console.conftest import NAMES, chromium_arguments

WATCHED = 45.0
"""Seconds with a page, and as many without."""


def cpu(process: psutil.Process) -> float:
    """CPU-seconds of a process and what it started."""
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


def url_of(console: subprocess.Popen[str]) -> str:
    """The address that a console prints."""
    assert console.stdout is not None
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/console/\?token=[^ ]+", line := console.stdout.readline())):
        assert line, "the console ended"
    return found.group(0)


def main(out: Path | None, steps: int) -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    lightning = [sys.executable, "-m", "lightning"]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        demo = subprocess.Popen(
            [*lightning, "demo", "tiny", "--no-pages", "--steps", str(steps), "--held-out", "8", "--out", str(folder)],
            stdout=subprocess.DEVNULL,
        )
        while not (folder / "vllm.log").exists() or "startup complete" not in (folder / "vllm.log").read_text():
            time.sleep(0.5)
            assert demo.poll() is None
        console = subprocess.Popen(
            [*lightning, "console", str(folder), "--no-browser"], stdout=subprocess.PIPE, text=True
        )
        url, process = url_of(console), psutil.Process(console.pid)
        time.sleep(5.0)  # what it loads at its start
        with sync_playwright() as playwright:
            path = next(found for each in NAMES if (found := shutil.which(each)))
            browser = playwright.chromium.launch(executable_path=path, args=chromium_arguments())
            for watching in (True, False):
                page = browser.new_page() if watching else None
                if page is not None:
                    page.goto(f"{url}&page=run%2Frun")
                    page.wait_for_selector("h1")
                began, before = time.monotonic(), cpu(process)
                time.sleep(WATCHED)
                took = time.monotonic() - began
                assert demo.poll() is None, "the run ended before it was measured: give more --steps"
                found["watched" if watching else "unwatched"] = (cpu(process) - before) / took
                if page is not None:
                    page.close()
            browser.close()
        for one in (console, demo):
            one.terminate()
            one.wait()
    sys.stdout.write("".join(f"cores while {key:<12}{value:>8.3f}\n" for key, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    main(given.json, given.steps)
