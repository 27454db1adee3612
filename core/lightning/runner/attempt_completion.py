"""Ends an attempt: judges its outcome against the recorded model calls, and stores the outcome.

The invariant: an outcome is judged against the calls in the store, not against the agent's word, and then given to the stages
of plugins. The process that talks to the database does both: the trainer for agents beside it, a server for agents anywhere
else. With every runner, an attempt that failed because no policy server was there does not count against the rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from lightning.errors import DataError, StaleAttemptError
from lightning.gateway.stages import NO_LINE, Line
from lightning.instrument.texts import number
from lightning.redaction import redacted_outcome
from lightning.runner.outcomes import cause_in_record, described
from lightning.store.protocol import Store
from lightning.types import (
    BRANCH_VOID,
    EXPIRED,
    UNSERVED,
    CallStatus,
    Fault,
    Outcome,
    Rollout,
    Status,
    Transition,
)

logger = logging.getLogger(__name__)

UNCALLED = "the agent returned a reward but never called the model"
"""The beginning of the error of an attempt that made no call. It stays the same in every release, because other code searches
for it."""
NEVER_CALLED = (
    f"{UNCALLED}: use llm.base_url and llm.api_key, and llm.model. If other "
    "rollouts of the same task did call it, a cache in the agent's client answers (DSPy and litellm have one): switch it off. "
    "A plugin's stage of calls may answer as well: LIGHTNING_DISABLE_PLUGINS leaves out the plugins that it lists"
)
SWALLOWED = (
    "the agent returned a reward after its last model call had failed because no policy server was there, so the reward "
    "may be that of the failure"
)
NEVER_FINISHED = (
    "the agent returned a reward but none of its model calls came to an end, so there is nothing to learn from"
)

OUTLIVED = (
    "the agent's API key expired under it, so that a model call was refused: raise gateway.token_ttl of the server above the "
    "client's runner.timeout"
)
OF_ROLLOUT = "use the `id` of a reply that the gateway gave to this rollout"
"""The cure for a label or a rejection of an unknown call."""


async def report(store: Store, rollout: str, attempt: int, outcome: Outcome, line: Line = NO_LINE) -> Rollout:
    """End an attempt with the outcome that the runner saw, corrected by the recorded model calls and by the stages of `line`.
    Return the rollout as it is stored then.

    Raises what `Store.complete` raises: `StaleAttemptError` if a later attempt has begun, or the attempt has ended with another
    outcome.
    """
    spend, calls = True, await store.transitions(rollout, attempt)
    if (kept := await store.get_rollout(rollout)) is not None:
        kept = replace(kept, attempt=attempt)
        outcome = with_rejections(outcome, calls)
        check_labels(kept, outcome, calls)
        if outcome.fault is None or not outcome.fault.is_loss:
            outcome = judge(outcome, calls, branch=kept.parent is not None)
            if kept.parent is not None and outcome.reward is not None and (why := line.why_not("branch")):
                why = f"the rollout {rollout} is a branch, and {why}"  # then no stage checks that it branched at all
                outcome = replace(outcome, reward=None, rewards={}, fault=Fault.INFRASTRUCTURE, error=why)
            spend = not (outcome.fault is Fault.INFRASTRUCTURE and any(map(is_unserved, calls)))
        outcome = await line.ended(kept, outcome, calls)
    if outcome.error or outcome.tool_events or outcome.step_states:  # in a thread, since tool events may be long
        outcome = await asyncio.to_thread(redacted_outcome, outcome)
    try:
        return await store.complete(rollout, attempt, outcome, spend=spend)
    except StaleAttemptError:
        found = await store.get_rollout(rollout)
        if found is None or not _ended_so(found, attempt, outcome):
            raise
        return found


def _ended_so(kept: Rollout, attempt: int, outcome: Outcome) -> bool:
    """Return whether an earlier report has ended the attempt with this outcome. Its tool events may differ, because later spans
    add to them."""
    if kept.attempt != attempt or kept.status is Status.RUNNING:
        return False
    told = (outcome.reward, dict(outcome.rewards), outcome.fault, outcome.error, outcome.seconds)
    return told == (kept.reward, dict(kept.rewards), kept.fault, kept.error, kept.seconds)


def judge(outcome: Outcome, calls: Sequence[Transition], *, branch: bool = False) -> Outcome:
    """Return the outcome as corrected by the model calls that were recorded for it.

    A reward without an answered call, or one that is not a finite number, becomes a fault of the agent. Three cases become a
    fault of the infrastructure and may be retried: the agent failed or ran out of time after the policy server had failed it;
    the agent returned a reward (`except Exception: return 0.0`) though no policy server was there for its last call; the agent
    called the model after its API key had expired. A failure that the model itself caused is a fault of the policy
    (`lightning.runner.outcomes`). A branch whose calls were refused as void has no reward, whatever its agent returned. A
    `branch` may have a reward without a call of its own, after an edited answer: the stage that answers branches checks that.
    """
    if why := next((call.error for call in calls if call.finish_reason == BRANCH_VOID), ""):
        return replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=why)
    failed = [call for call in calls if call.status is CallStatus.ERROR]  # at the policy server, or at a plugin's stage
    # An expired key is recorded in the store only as the end of a call.
    if outcome.fault is not Fault.INFRASTRUCTURE and any(call.finish_reason == EXPIRED for call in failed):
        message = f"{OUTLIVED}; the agent ended with: {outcome.error}" if outcome.error else OUTLIVED
        return replace(outcome, reward=None, rewards={}, fault=Fault.INFRASTRUCTURE, error=message)
    if outcome.reward is not None and not branch and not any(call.status.answered for call in calls):
        message = NEVER_FINISHED if calls else NEVER_CALLED
        if refused := [call for call in calls if call.status is CallStatus.REFUSED]:
            message += f". {len(refused)} of {len(calls)} were refused; the first: {refused[0].error}"
        outcome = replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=message)
    if outcome.reward is not None and (problem := _no_reward(outcome)):
        outcome = replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=problem)
    if outcome.reward is not None and calls and is_unserved(max(calls, key=lambda call: call.seq)):
        return replace(outcome, reward=None, rewards={}, fault=Fault.INFRASTRUCTURE, error=SWALLOWED)
    if failed and outcome.fault in (Fault.AGENT, Fault.POLICY, Fault.TIMEOUT):
        message = f"a model call failed at the policy server, then the agent: {outcome.error}"
        if failed[0].error:
            message = f"a model call failed ({failed[0].error}), then the agent: {outcome.error}"
        return replace(outcome, fault=Fault.INFRASTRUCTURE, error=message)
    if cause := cause_in_record(outcome, calls):
        return replace(outcome, fault=Fault.POLICY, error=described(cause, outcome.error))
    return outcome


def _no_reward(outcome: Outcome) -> str:
    """Return what is wrong with a reward that none of our runners has checked (from a client in another language); "" if
    nothing."""
    try:
        number(outcome.reward, "the reward")
        for step in outcome.step_rewards:
            number(step.value, f"the step reward {step.name!r}", "give a finite number")
    except DataError as error:
        return str(error)
    return ""


def is_unserved(call: Transition) -> bool:
    """Whether a call failed because there was no policy server, or because the policy server went away during the call."""
    return call.status is CallStatus.ERROR and call.finish_reason == UNSERVED


def with_rejections(outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
    """Return the outcome with the calls that the agent rejected by later calls of the attempt (`Transition.rejects`) as
    untrained. A reason that the outcome itself has for a call stays."""
    rejected = {each: reason for call in calls for each, reason in call.rejects.items()}
    return replace(outcome, untrained={**rejected, **outcome.untrained}) if rejected else outcome


def check_labels(rollout: Rollout, outcome: Outcome, calls: Sequence[Transition], cure: str = OF_ROLLOUT) -> None:
    """Warn of labels and rejections of calls that are not recorded; the store ignores them. Branches get no warning: they may
    name parents' calls. `cure` is what to do about it."""
    known = {call.id for call in calls}
    for what, named in (("lightning.label()", outcome.labels), ("a rejection", outcome.untrained)):
        if (unknown := sorted(named.keys() - known)) and rollout.parent is None:
            logger.warning(
                "rollout %s, attempt %d: %s named %d responses that are not recorded, such as %.200r: %s",
                rollout.id,
                rollout.attempt,
                what,
                len(unknown),
                unknown[0],
                cure,
            )
