"""`make test-official`: runs the programs of the list, those of others as they were published, and writes the table in
`docs/frameworks/tested-programs.md`.

The invariant: what does not come out as the list says stands in the table, and makes the command fail.

    python -m tests.official.run [WORD ...]     only programs whose name has one of the words; the table stays as it is
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.official import table
from tests.official.listing import Listing, load
from tests.official.sources import ROOT, environment, fetch
from tests.official.suite import Result


def main(words: Sequence[str]) -> int:
    """Run, write, and return the exit code."""
    listing = load()
    for source in listing.sources.values():
        fetch(source)
    results, missing = [], {}
    for venv, packages in listing.venvs.items():
        names = [one.name for one in listing.programs if one.venv == venv]
        names = [name for name in names if not words or any(word in name for word in words)]
        if not names:
            continue
        try:
            python = environment(venv, packages)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            missing[venv] = f"the environment could not be made: {error}"
            continue
        results += list(_results(str(python), names))
    lacking = _lacking(listing, results, words)
    for result in results:
        for problem in result.problems:
            sys.stderr.write(f"{result.program}: {problem}\n")
    for line in (*missing.values(), *(f"{name}: did not run" for name in lacking)):
        sys.stderr.write(f"{line}\n")
    if not words:
        table.PAGE.write_text(table.page(listing, results), encoding="utf-8")
    right = sum(not result.problems for result in results)
    sys.stdout.write(
        f"{right} of {len(results)} programs as the list says, {sum(one.calls for one in results)} calls\n"
    )
    return int(right < len(results) or bool(lacking))


def _results(python: str, names: Sequence[str]) -> Iterator[Result]:
    """Run programs in an environment; each result as it comes."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (python, "-m", "tests.official.suite", *names)
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = Result(**json.loads(line))
            sys.stdout.write(f"{result.program}: {result.calls} calls, {'; '.join(result.problems) or 'right'}\n")
            yield result
    if process.returncode:
        sys.stderr.write(f"the suite ended with {process.returncode}: see above\n")


def _lacking(listing: Listing, results: Sequence[Result], words: Sequence[str]) -> list[str]:
    ran = {result.program for result in results}
    return [
        one.name
        for one in listing.programs
        if one.name not in ran and (not words or any(word in one.name for word in words))
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
