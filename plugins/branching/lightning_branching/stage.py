"""The call stage of branches, which answers the first calls of a branch from its parent's record, and the route for its tools.

The invariant: a branch whose early requests differ from its parent's is void. Its calls are refused with an error that says
where they differ, and its outcome has no reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import orjson
from lightning.gateway.http import Body, beside, send_bytes, too_deep
from lightning.gateway.stages import CallStage
from lightning.types import CallStatus, Fault, Json, Outcome, Rollout, Transition
from lightning_record import exchanges
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_branching.branch_answers import BranchedAttempt, Branches, Inherits
from lightning_branching.recorded import prefix_of, read_rollout, why_no_branch
from lightning_branching.streams import answer_of
from lightning_branching.tools import BRANCHES

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts
    from lightning.gateway.policy import LiveCall

TEXTS: Final = "texts"
"""The name of the stage that stores the texts of calls."""


class BranchesStage(CallStage):
    """Answers the first calls of a branch from its parent's record, and checks the later ones against it."""

    api, after, before = 1, ("providers",), ("conversations",)
    answers = only_for = ("branch",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._calls: WeakKeyDictionary[Call, tuple[BranchedAttempt, bool]] = WeakKeyDictionary()

    @cached_property
    def branches(self) -> Branches:
        """The branches that this gateway answers. Their texts are packed as differences from their parents' texts."""
        texts = self._parts.line.named(TEXTS)
        return Branches(self._parts.store, texts if isinstance(texts, Inherits) else None)

    async def planned(self, rollout: Rollout) -> None:
        """Raise `DataError` for a planned branch whose parent cannot be branched at that call."""
        if rollout.parent is not None:
            parent, attempt, seq = rollout.parent
            prefix_of(await read_rollout(self._parts.store, parent, attempt), seq)

    def told(self, rollout: Rollout) -> Json:
        """Return True for a branch, so that `lightning_branching.tools` answers its tools, too; None for any other rollout."""
        return True if rollout.parent is not None else None

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Answer a call of a branch from the record; return None if it must be sampled. Raises `RefusalError` as
        `BranchedAttempt.answer` does."""
        branch, path = await self.branches.of(call.claims), call.dialect.path
        try:
            asked = await beside(request.scope, partial(exchanges.canonical, request.body))
        except RecursionError:
            raise too_deep() from None
        found = await branch.answer(call.caller.name, path, request.body, asked)
        if found is not None:
            if branch.has_edit:
                await self.branches.keep_edit(branch, call.claims)
            status, kind, content = answer_of(found, request.body)
            return Response(content, status, {"content-type": kind, "x-request-id": found.transition.id})
        self._calls[call] = branch, branch.prefix.at.key == (path, asked)
        # Withheld until its end, because only then is it known whether the right version sampled all of it.
        call.withheld = "a branch" if branch.is_live else ""
        if call.dialect.continues(request.body) in branch.recorded_ids:
            call.lineage = branch.owner
        return None

    async def sending(self, call: Call, body: Body) -> None:
        """Replace the seed in a request, which is the parent's, by a seed of the branch's own."""
        if call in self._calls and isinstance(body.get("seed"), int):
            body["seed"] = BranchedAttempt.own_seed(call.claims, body["seed"])

    async def settled(self, call: Call, answer: Answer) -> None:
        """Void the branch if the branching call had another prompt, or the call another policy version, than was recorded."""
        if (known := self._calls.get(call)) is None or not answer.status:
            return
        branch, is_branching = known
        if is_branching and answer.outcome is CallStatus.OK:
            branch.check_prompt(call.capture.choice(0).prompt_ids or call.capture.prompt_ids or ())
        if call.capture.choices and not call.frozen:  # a frozen policy has one version
            branch.check_version(sampled_by(call.sent.live))

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Take the reward from a branch whose calls do not show that it branched, and make it a fault of the agent."""
        if rollout.parent is None or not (outcome.reward is not None or outcome.fault is Fault.POLICY):
            return outcome
        why = await why_no_branch(self._parts.store, rollout, calls)
        return replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=why) if why else outcome


def sampled_by(live: LiveCall) -> set[int] | None:
    """Return the policy versions that sampled a call's tokens; None if they are unknown."""
    shown = live.capture.choices.items()
    runs = (run for index, choice in shown for run in live.versions(index, len(choice.response_ids)))
    return None if live.unsure else {run.version for run in runs}


class ToolRuns:
    """`GET /v1/tool_runs`: the recorded runs of tools of a branch, for the process that runs its agent; none for any other
    attempt."""

    def __init__(self, parts: Parts) -> None:
        self._identity, self._line = parts.identity, parts.line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        claims, stage = self._identity.claims(scope), self._line.named(BRANCHES)
        asked = stage.branches.of(claims) if claims.branch and isinstance(stage, BranchesStage) else None
        runs = () if asked is None else (await asked).prefix.tool_events
        await send_bytes(send, 200, orjson.dumps({"tool_runs": [asdict(run) for run in runs]}))
