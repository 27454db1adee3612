"""The tools of a branch: those that ran before the call at which it branches give what they gave, and do not run again.

The stage of calls of the same name says which attempts are branches.

The invariant: only a run with the recorded arguments is answered; any other tool runs. Where nobody says which ran, the agent
is not started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from lightning.runner.outcomes import read_tool_event
from lightning.runner.stages import AttemptRefusedError, AttemptStage
from lightning.types import LLM, Fault, Task, ToolEvent

from lightning_branching.recorded_tools import RecordedRuns, answer_tools

BRANCHES: Final = "branches"
"""The name of the stages of this plugin, in the line of calls and around attempts."""
TIMEOUT: Final = 60.0
TRIES: Final = 4
"""How often the gateway is asked."""
PAUSE: Final = 0.5
"""Seconds after the first time; they double."""


class BranchToolsStage(AttemptStage):
    """Recorded runs of `lightning.tool` are answered in a branch."""

    api = 1

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """Nothing outside of a branch."""
        return _answered(llm) if llm.extras.get(BRANCHES) else None


@contextmanager
def _answered(llm: LLM) -> Iterator[None]:
    with answer_tools(llm.api_key, RecordedRuns(_recorded(llm)).take):
        yield


def _recorded(llm: LLM) -> list[ToolEvent]:
    for number in range(TRIES):
        try:
            return _asked(llm)
        except AttemptRefusedError as error:
            if error.fault is not Fault.INFRASTRUCTURE or number == TRIES - 1:
                raise
            time.sleep(PAUSE * 2**number)
    raise AssertionError("the last try returns or raises")


def _asked(llm: LLM) -> list[ToolEvent]:
    import urllib.error
    import urllib.request  # only in a branch: every process of agents imports this module when it begins

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the gateway is no proxy's to reach
    request = urllib.request.Request(  # noqa: S310 — the gateway's own address
        f"{llm.base_url}/tool_runs", headers={"authorization": f"Bearer {llm.api_key}"}
    )
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return [read_tool_event(event) for event in json.load(answer)["tool_runs"]]
    except urllib.error.HTTPError as error:
        with error:
            fault = Fault.INFRASTRUCTURE if error.code >= 500 else Fault.AGENT
            raise AttemptRefusedError(_message(error.read()), fault) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the gateway does not say which tools ran before the branch: {error}"
        raise AttemptRefusedError(message, Fault.INFRASTRUCTURE) from error


def _message(body: bytes) -> str:
    """What an error object says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:1000]
