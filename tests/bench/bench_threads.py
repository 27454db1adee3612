"""What it costs to carry names into threads: CPU per submitted call and per thread, without the patch and with it.

Each kind takes turns in short blocks; what is printed is the median over the turns, in microseconds of CPU of the process.

    python tests/bench/bench_threads.py
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

from lightning.instrument import activate, component
from lightning.instrument.threads import carry_names
from lightning.types import LLM

TURNS, CALLS = 15, 2000
KINDS = ("before", "after, outside a rollout", "after, inside a rollout")


def submits() -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(CALLS):
            pool.submit(int).result()


def threads() -> None:
    for _ in range(CALLS):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def measure(work: Callable[[], None], kind: str) -> float:
    """CPU microseconds for each call."""
    with ExitStack() as stack:
        if kind != KINDS[0]:
            stack.callback(carry_names())
        if kind == KINDS[2]:
            stack.enter_context(activate(LLM("http://127.0.0.1:1/v1", "key", "policy")))
            stack.enter_context(component("writer"))
        began = time.process_time()
        work()
        return (time.process_time() - began) / CALLS * 1e6


def main() -> None:
    for name, work in (("ThreadPoolExecutor.submit", submits), ("threading.Thread", threads)):
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(TURNS):
            for kind in KINDS:
                found[kind].append(measure(work, kind))
        said = ", ".join(f"{kind}: {median(times):.1f} us" for kind, times in found.items())
        sys.stdout.write(f"{name}: {said}\n")


if __name__ == "__main__":
    main()
