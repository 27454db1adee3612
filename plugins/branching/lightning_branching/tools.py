"""The attempt stage of branches: tools that ran before the branching call return their recorded results and do not run again.

The call stage of the same name marks the attempts that are branches.

The invariant: only a call of a tool with recorded arguments is answered; any other tool runs. If the gateway does not send the
recorded runs, the agent is not started.
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
"""How often the gateway is asked for the recorded runs."""
PAUSE: Final = 0.5
"""Seconds until the gateway is asked a second time; the pause doubles each time."""


class BranchToolsStage(AttemptStage):
    """Answers `lightning.tool`s in a branch from the recorded runs."""

    api = 1

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """Return a context in which tools are answered from the record; None if the attempt is no branch. The context raises
        `AttemptRefusedError` if the gateway does not send the recorded runs."""
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
    """Return the message in an error body; if there is none, the beginning of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:1000]
