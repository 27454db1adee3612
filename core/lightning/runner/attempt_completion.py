"""Ends an attempt: judges its outcome against what was recorded of it, and keeps it.

The invariant: an outcome is judged against the calls that the store has, not against the agent's word, and then given to the
stages of plugins, by the process that talks to the database: the trainer for agents beside it, a server for agents anywhere
else. An attempt that failed because no policy server was there is given back and not spent, whichever runner had it.
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
"""How the error begins, in every release."""
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


async def report(store: Store, rollout: str, attempt: int, outcome: Outcome, line: Line = NO_LINE) -> Rollout:
    """End an attempt with the outcome that the runner saw, in the light of what is stored and of what stages say of it; return
    the rollout as it stands.

    Raises what `Store.complete` raises: `StaleAttemptError` for an attempt that was superseded or has ended otherwise.
    """
    spend, calls = True, await store.transitions(rollout, attempt)
    if (kept := await store.get_rollout(rollout)) is not None:
        kept = replace(kept, attempt=attempt)
        _check_labels(kept, outcome, calls)
        if outcome.fault is not Fault.INFRASTRUCTURE:
            outcome = judge(outcome, calls, branch=kept.parent is not None)
            if kept.parent is not None and outcome.reward is not None and (why := line.why_not("branch")):
                why = f"the rollout {rollout} is a branch, and {why}"  # nobody looks whether it branched at all
                outcome = replace(outcome, reward=None, rewards={}, fault=Fault.INFRASTRUCTURE, error=why)
            spend = not (outcome.fault is Fault.INFRASTRUCTURE and any(map(is_unserved, calls)))
        outcome = await line.ended(kept, outcome, calls)
    if outcome.error or outcome.tool_events or outcome.step_states:  # in a thread, since tools may say a lot
        outcome = await asyncio.to_thread(redacted_outcome, outcome)
    try:
        return await store.complete(rollout, attempt, outcome, spend=spend)
    except StaleAttemptError:
        found = await store.get_rollout(rollout)
        if found is None or not _ended_so(found, attempt, outcome):
            raise
        return found


def _ended_so(kept: Rollout, attempt: int, outcome: Outcome) -> bool:
    """Whether the attempt has ended with this outcome, told before: spans that came since have only added to its events."""
    if kept.attempt != attempt or kept.status is Status.RUNNING:
        return False
    told = (outcome.reward, dict(outcome.rewards), outcome.fault, outcome.error, outcome.seconds)
    return told == (kept.reward, dict(kept.rewards), kept.fault, kept.error, kept.seconds)


def judge(outcome: Outcome, calls: Sequence[Transition], *, branch: bool = False) -> Outcome:
    """The outcome in the light of the model calls that were recorded for it.

    A reward without a successful call is nobody's success, and one that cannot be trained on is none. An agent that failed,
    or ran out of time, after the policy server had failed under it is not at fault: the attempt counts as an infrastructure
    failure and may be retried. So does one that made a reward of it (`except Exception: return 0.0`), its last call unserved,
    and one that outlived its API key and called the model after that. What the model did wrong itself is a fault of the
    policy's (`lightning.runner.outcomes`). A branch whose calls were refused as void has no reward, whatever it came to.
    A `branch` may have a reward without a call of its own, after an edited answer: the stage that answers branches looks at
    that.
    """
    if why := next((call.error for call in calls if call.finish_reason == BRANCH_VOID), ""):
        return replace(outcome, reward=None, rewards={}, fault=Fault.AGENT, error=why)
    failed = [call for call in calls if call.status is CallStatus.ERROR]  # at the policy server, or at a plugin's stage
    expired = any(
        call.finish_reason == EXPIRED for call in failed
    )  # the store has no other word of a key that had expired
    if outcome.fault is not Fault.INFRASTRUCTURE and expired:
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
    """What is wrong with a reward that no runner of ours has looked at (a client in another language), or ""."""
    try:
        number(outcome.reward, "the reward")
        for step in outcome.step_rewards:
            number(step.value, f"the step reward {step.name!r}", "give a finite number")
    except DataError as error:
        return str(error)
    return ""


def is_unserved(call: Transition) -> bool:
    """Whether a call failed because no policy server was there, or went away with it."""
    return call.status is CallStatus.ERROR and call.finish_reason == UNSERVED


def _check_labels(rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> None:
    """Say which labels name no call; the store ignores them. In a branch some are of calls that its parent has."""
    unknown = sorted(set(outcome.labels) - {call.id for call in calls})
    if unknown and rollout.parent is None:
        logger.warning(
            "rollout %s, attempt %d: lightning.label() named %d responses that are not recorded, such as %.200r: "
            "use the `id` of a reply that the gateway gave to this rollout",
            rollout.id,
            rollout.attempt,
            len(unknown),
            unknown[0],
        )
