"""The tools of a branch: those that ran before the call at which it branches give what they gave, and do not run again.

The invariant: only a run with the recorded arguments is answered; any other tool runs. Where nobody says which ran, the agent
is not started.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

from lightning.errors import RunnerError
from lightning.instrument.recorded_tools import RecordedRuns, answer_tools
from lightning.runner.outcomes import read_tool_event
from lightning.types import LLM, Fault, ToolEvent

TIMEOUT: Final = 60.0
TRIES: Final = 4
"""How often the gateway is asked."""
PAUSE: Final = 0.5
"""Seconds after the first time; they double."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Straight to the gateway: it is no proxy's to reach."""


class NoBranchError(RunnerError):
    """An agent cannot be run as a branch. `fault` is whose that is: the infrastructure's where nobody has answered."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


@contextmanager
def branch_tools(llm: LLM) -> Iterator[None]:
    """Inside the block, in a branch, recorded runs of `lightning.tool` are answered. Raises `NoBranchError`."""
    with answered_with(llm, recorded_runs(llm)):
        yield


def recorded_runs(llm: LLM) -> RecordedRuns | None:
    """The tool runs that are answered in a branch; None outside one. It waits for the gateway: call it in a thread where a loop
    runs. Raises `NoBranchError`."""
    return RecordedRuns(_recorded(llm)) if llm.branch else None


@contextmanager
def answered_with(llm: LLM, runs: RecordedRuns | None) -> Iterator[None]:
    """Inside the block these runs are answered, if there are any."""
    with nullcontext() if runs is None else answer_tools(llm.api_key, runs.take):
        yield


def _recorded(llm: LLM) -> list[ToolEvent]:
    for number in range(TRIES):
        try:
            return _asked(llm)
        except NoBranchError as error:
            if error.fault is not Fault.INFRASTRUCTURE or number == TRIES - 1:
                raise
            time.sleep(PAUSE * 2**number)
    raise AssertionError("the last try returns or raises")


def _asked(llm: LLM) -> list[ToolEvent]:
    request = urllib.request.Request(  # noqa: S310 — the gateway's own address
        f"{llm.base_url}/tool_runs", headers={"authorization": f"Bearer {llm.api_key}"}
    )
    try:
        with _OPENER.open(request, timeout=TIMEOUT) as answer:
            return [read_tool_event(event) for event in json.load(answer)["tool_runs"]]
    except urllib.error.HTTPError as error:
        with error:
            fault = Fault.INFRASTRUCTURE if error.code >= 500 else Fault.AGENT
            raise NoBranchError(_message(error.read()), fault) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the gateway does not say which tools ran before the branch: {error}"
        raise NoBranchError(message, Fault.INFRASTRUCTURE) from error


def _message(body: bytes) -> str:
    """What an error object says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:1000]
