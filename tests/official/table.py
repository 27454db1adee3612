"""The page with the table of tested programs, from the results of `make test-official`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.official.listing import Listing, Program
from tests.official.suite import Result

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "tested-programs.md"

HEAD = """# Tested programs

`make test-official` runs published programs, and short programs in the shape of each framework's documentation, and writes
this page. It shows which frameworks work unchanged, and what lightning cannot see of them.

Each program runs unchanged in a rollout's process, with the real gateway and store. A fake policy server refuses requests that
vLLM refuses, asks for each tool once and then answers. Then the store is compared with the fake's own log:

- *calls*: each answer is recorded once, token by token;
- *names*: the agents have the names that `tests/official/programs.toml` lists;
- *tools*: each tool run is reported once, with its name and the id of its call.

No call stays open, no process stays alive, and no rollout's key goes elsewhere.

| framework | version | programs | calls | calls right | names right | tools right |
|---|---|---|---|---|---|---|
"""


def programs_section(listing: Listing) -> str:
    """The end of the page: where the programs come from, and where each is listed."""
    return "\n## The programs\n\n`tests/official/programs.toml` lists each program.\n" + "".join(
        _sources(listing.programs)
    )


def page(listing: Listing, results: Sequence[Result]) -> str:
    """The whole page."""
    return HEAD + "".join(_rows(listing, results)) + "".join(_remarks(listing, results)) + programs_section(listing)


def _rows(listing: Listing, results: Sequence[Result]) -> Iterator[str]:
    known = {program.name: program for program in listing.programs}
    for framework in dict.fromkeys(program.framework for program in listing.programs):
        ran = [result for result in results if result.framework == framework]
        if not ran:
            yield f"| {framework} | | 0 | | | | |\n"
            continue
        told = [result for result in ran if not known[result.program].untold]
        cells = (
            framework,
            ran[0].version,
            str(len(ran)),
            str(sum(result.calls for result in ran)),
            _share(ran, "calls"),
            _share(ran, "names") if not known[ran[0].program].unnamed else "no adapter",
            _share(told, "tools") if told else "not told",
        )
        yield f"| {' | '.join(cells)} |\n"
    cells = (
        "all",
        "",
        str(len(results)),
        str(sum(result.calls for result in results)),
        _share(results, "calls"),
        "",
        "",
    )
    yield f"| {' | '.join(cells)} |\n"


def _share(results: Sequence[Result], kind: str) -> str:
    return f"{sum(not result.wrong(kind) for result in results)} of {len(results)}"


def _remarks(listing: Listing, results: Sequence[Result]) -> Iterator[str]:
    untold = {program.framework: program.untold for program in listing.programs if program.untold}
    yield "\n## Tools that are not compared\n\n"
    yield from (f"- {framework}: {why}.\n" for framework, why in untold.items())
    refused = [program for program in listing.programs if program.why]
    yield "\n## Programs that end with an error or have calls refused\n\n"
    yield "They do so by design, or ask for something that vLLM cannot do. Answered and refused calls are recorded.\n\n"
    yield from (f"- `{program.name}`: {program.why}.\n" for program in refused)
    wrong = [result for result in results if result.problems]
    if wrong:
        yield "\n## What is not as it should be\n\n"
        yield from (f"- `{result.program}`: {_short(result.problems)}\n" for result in wrong)


def _short(problems: Iterable[str]) -> str:
    return "; ".join(" ".join(problem.split())[:300] for problem in problems)


def _sources(programs: Sequence[Program]) -> Iterator[str]:
    published = Counter(program.source for program in programs if program.source)
    told = ", ".join(f"{count} from `{source}`" for source, count in published.items())
    yield f"Of source distributions are {told}; the others have the shape of their framework's documentation.\n"
