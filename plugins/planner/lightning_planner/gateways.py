"""The gateway's part of a call, from measurements: the CPU that a call takes, by the number of gateway processes and the length
of the prompt.

The invariant: every number here was measured and stands in docs/benchmarks.md ("Gateways in processes of their own").
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightning_planner.costs import GatewayCosts

BY_PROCESSES: Mapping[int, float] = {0: 1.65e-3, 1: 1.75e-3, 2: 2.5e-3, 4: 2.65e-3}
"""CPU-seconds of a call by the number of processes beside the trainer's, each the mean of two runs. With more processes fewer
calls share a transaction of the store."""
BY_PROMPT: Mapping[int, float] = {1_000: 2.08e-3, 8_000: 2.92e-3, 64_000: 3.21e-3}
"""CPU-seconds of a call by the tokens of its prompt."""
MEASURED = "bench_gateway_processes.py, commits b776be4c and 5ebf9859, SQLite, two shared cores of an Intel Xeon"
"""Where the numbers come from."""


def gateway_costs(processes: int, prompt: float) -> GatewayCosts:
    """Return the gateway's costs with so many processes beside the trainer's (0: the trainer's alone), for calls with a mean of
    `prompt` tokens. Between measured numbers they grow evenly, beyond them they stay."""
    longer = _between(BY_PROMPT, prompt) / BY_PROMPT[1_000]
    return GatewayCosts(_between(BY_PROCESSES, processes) * longer, max(1, processes))


def _between(table: Mapping[int, float], at: float) -> float:
    return float(np.interp(at, list(table), list(table.values())))
