"""Runs every benchmark of this folder, each in a process of its own, and keeps its numbers as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def about() -> dict[str, str | int]:
    """What a published figure names beside itself: the commit, and the machine."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8"], cwd=HERE, capture_output=True, text=True, check=False
    )
    models = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": git.stdout.strip() or "unknown",
        "cpu": models[0] if models else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main(out: Path, names: list[str]) -> int:
    """Run the benchmarks whose names contain one of `names` (none: all); return how many failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "about.json").write_text(json.dumps(about(), indent=2) + "\n")
    failed = []
    for script in sorted(HERE.glob("bench_*.py")):
        name = script.stem.removeprefix("bench_")
        if names and not any(wanted in name for wanted in names):
            continue
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        began = time.monotonic()
        ran = subprocess.run([sys.executable, str(script), "--json", str(out / f"{name}.json")], check=False)
        sys.stdout.write(f"== {name}: {'failed' if ran.returncode else 'done'} in {time.monotonic() - began:.0f} s\n")
        if ran.returncode:
            failed.append(name)
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the benchmarks' names; none runs all")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder for the JSON files")
    given = parser.parse_args()
    sys.exit(min(main(given.out, given.names), 1))
