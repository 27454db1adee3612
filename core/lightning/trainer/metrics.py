"""The metrics of a step, except its times: what was sampled and trained, and what its requests needed of the policy server.
Also warnings, with the cure, about calls and groups that were not trained (`Remarks`).

The invariant: a metric that was not measured is absent, and never 0: a mean of no rollouts, a share of no tokens, the counts of
a server that does not count. A server that was restarted meanwhile gives its counts since then. Each warning is made once in a
process, or at growing distances, and changes nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

import numpy as np

from lightning.algorithms.intake import trains
from lightning.algorithms.protocol import Batch
from lightning.batch.trajectory import Group, is_trained
from lightning.bounded import Once
from lightning.engines.protocol import StepResult
from lightning.gateway.http import CURE_OF_LENGTH
from lightning.policy_server.protocol import PolicyServer, Usage
from lightning.runner.outcomes import read_cause
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.trainer.summary import NAMED, POLICY_FAULT, mean_parts
from lightning.trainer.training_data import NOT, OF_MODEL, OF_POLICY, is_trainable
from lightning.types import GREEDY_BELOW, TOO_LONG, Caller, CallStatus, Fault, Rollout, Status, Transition

logger = logging.getLogger(__name__)


LONG_PROMPT = 256
"""Mean tokens of prompts from which on a shared beginning must be found again, even in vLLM's largest usual blocks of 128."""
CURE = (
    "give vLLM more room (policy_server.kv_cache_bytes; on CUDA policy_server.gpu_memory_utilization), or run fewer agents "
    "at once (runner.concurrency)"
)


class _Counters:
    """The counters of one policy server, as they were read last."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._before = Usage()
        self._known = ("", "")
        """The alias and the claim of the server that counted before: another one has started its counts anew."""

    async def since(self) -> Usage | None:
        """Return what the server's requests have needed since the last call; None if unknown."""
        now = await self._server.usage()
        if now is None:
            return None
        (alias, claim), before = self._known, self._before
        server = self._server.alias, self._server.claim
        again = server[0] != alias or any(count < earlier for count, earlier in zip(now, before, strict=True))
        self._before, self._known = now, server
        if not again and server[1] != claim:
            return None  # claimed anew: whether it was also started anew, and since when it counts, is not known
        return now if again else Usage(*(count - earlier for count, earlier in zip(now, before, strict=True)))


class UsageMeter:
    """Reads the policy servers' counters once a step. Evaluation calls count toward the next step; requests from before we
    attached count toward the first step."""

    def __init__(self, servers: Sequence[PolicyServer]) -> None:
        self._servers, self._counters = servers, [_Counters(server) for server in servers]
        self._said = Once()

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics since the last call: `prefix_hit_share` (the share of prompt tokens found in the cache) and
        `preemptions` of all servers, and, where there are several, requests, cache hits and version of each.

        Warn, once each, of preemptions and of a cache that finds nothing.
        """
        found = [await counters.since() for counters in self._counters]
        known = [usage for usage in found if usage is not None]
        single = self._of_each(found) if len(found) > 1 else {}
        if len(known) < len(found):
            return single
        since = Usage(*map(sum, zip(*known, strict=True)))
        if since.preemptions and self._said.first("preempted"):
            logger.warning(
                "vLLM preempted %d requests because its KV cache was full, and computes them again: %s",
                since.preemptions,
                CURE,
            )
        if self._nothing_found(since, groups) and self._said.first("prefixes"):
            logger.warning(
                "no prompt hit vLLM's prefix cache, in %d requests of %.0f tokens on average, though rollouts of one "
                "task begin alike: %s; or take --no-enable-prefix-caching out of its arguments",
                since.requests,
                since.prompt_tokens / since.requests,
                CURE,
            )
        return {**_hit_share(since), "preemptions": float(since.preemptions), **single}

    def _of_each(self, found: Sequence[Usage | None]) -> dict[str, float]:
        told: dict[str, float] = {}
        for number, (server, usage) in enumerate(zip(self._servers, found, strict=True)):
            counts = {} if usage is None else {"requests": float(usage.requests), **_hit_share(usage)}
            told |= {f"server_{number}/{name}": count for name, count in counts.items()}
            told[f"server_{number}/version"] = float(server.version)
        return told

    def _nothing_found(self, since: Usage, groups: Sequence[Group]) -> bool:
        alike = any(len(group.trajectories) > 1 for group in groups)
        return alike and not since.cached_tokens and since.prompt_tokens >= LONG_PROMPT * since.requests > 0


def _hit_share(usage: Usage) -> dict[str, float]:
    """Return the share of prompt tokens that were found in the cache; empty without prompts."""
    return {"prefix_hit_share": usage.cached_tokens / usage.prompt_tokens} if usage.prompt_tokens else {}


def step_metrics(
    rollouts: Sequence[Rollout],
    groups: Sequence[Group],
    batch: Batch,
    result: StepResult,
    *,
    resting: Sequence[str] = (),
) -> dict[str, float]:
    """Return the metrics of what was sampled, what was left out and why, and the engine's own. Reward metrics are absent for a
    step without new rollouts, or whose rollouts have no reward. Calls of the policies that are `resting` are trained in these
    policies' own turns, so their rollouts are not counted as wholly untrained."""
    begun = [rollout for rollout in rollouts if rollout.parent is None]  # branches start where somebody chose
    rewards = [rollout.reward for rollout in begun if rollout.reward is not None]
    calls = [
        len(member.transitions) for group in groups for member in group.trajectories if member.rollout.parent is None
    ]
    trained = trained_calls(groups)
    skipped = sum(batch.skipped.values())
    return {
        **result.metrics,
        **{f"skipped/{reason}": float(count) for reason, count in batch.skipped.items()},
        **{f"dropped/{reason}": float(count) for reason, count in batch.dropped.items()},
        **{f"{NAMED}{name}": value for name, value in mean_parts(begun).items()},
        **({"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))} if rewards else {}),
        **({"reward_with_failures": sum(rewards) / len(begun)} if rewards or any_failed(begun) else {}),
        "rollouts": float(len(rollouts)),
        "failed": float(sum(rollout.status is Status.FAILED for rollout in rollouts)),
        **policy_faults(rollouts),
        "groups": float(len(groups)),
        "groups_used": float(len(groups) - skipped),
        "rows": float(len(batch.samples)),
        "rollouts_trained": float(len(batch.used)),
        **({"calls_per_rollout": float(np.mean(calls))} if calls else {}),
        **({"too_long": float(refused)} if (refused := count_too_long(rollouts, groups)) else {}),
        **({"dropped/media": float(media)} if (media := len(media_calls(groups))) else {}),
        **({"truncated": count_truncated(trained) / len(trained)} if trained else {}),
        **({} if resting else wholly_untrained(groups)),
    }


def any_failed(rollouts: Iterable[Rollout]) -> bool:
    """Whether a rollout failed."""
    return any(rollout.status is Status.FAILED for rollout in rollouts)


def policy_faults(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return how many rollouts failed by the model's own fault, by cause, as metrics."""
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    causes = Counter(read_cause(rollout.error) for rollout in failed if rollout.fault is Fault.POLICY)
    return {f"{POLICY_FAULT}{cause}": float(count) for cause, count in sorted(causes.items())}


def trained_calls(groups: Sequence[Group]) -> list[Transition]:
    """Return the calls of the groups that belong to trained agents and have tokens to train on."""
    return [
        call
        for group in groups
        for member in group.trajectories
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if is_trained(call, trainable)
    ]


def calls_of(groups: Sequence[Group]) -> Iterator[Transition]:
    """Yield the answered calls of the groups."""
    for group in groups:
        for member in group.trajectories:
            yield from member.transitions


def untrained_reasons(calls: Iterable[Transition]) -> Counter[str]:
    """Return how many of the calls are marked as untrained, by reason. Choices of one call count once."""
    return Counter(call.untrained for call in calls if call.untrained and not call.choice)


def most_reasons(found: Mapping[str, float], named: Collection[str] = ()) -> dict[str, float]:
    """Return numbers of untrained calls by reason, the most first, then by name: those that are `named` already and as many
    others as leave `MOST_NAMES` in all, since agents may make reasons up. The sum of the rest is `other`."""
    new = sorted(found.keys() - {*named, OTHER}, key=lambda name: (-found[name], name))
    kept = {*named, *new[: max(0, MOST_NAMES - len(named))]}
    told = sorted(found.keys() & kept, key=lambda name: (-found[name], name))
    rest = sum(number for name, number in found.items() if name not in kept)
    return {name: found[name] for name in told} | ({OTHER: rest} if rest else {})


class UntrainedCalls:
    """Counts the untrained calls of a run's steps by reason. The first `MOST_NAMES` reasons of the run have a metric each, so
    that a run has few metrics however long it is; the committed steps say after a resume which these are."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._named: set[str] | None = None

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of a step; empty without such a call. Raises `StoreError`."""
        if not (found := untrained_reasons(calls_of(groups))):
            return {}
        if self._named is None:
            records = await self._store.steps(self._run, brief=True)
            told = {name for record in records for name in record.metrics if name.startswith(UNTRAINED)}
            self._named = {name.removeprefix(UNTRAINED) for name in told} - {OTHER}
        counts = most_reasons(found, self._named)
        self._named |= counts.keys() - {OTHER}
        return {f"{UNTRAINED}{name}": count for name, count in counts.items()}


def said_reasons(found: Mapping[str, float]) -> str:
    """Format numbers of untrained calls by reason, the most first: `3 title; 1 compaction, rejected`."""
    return "; ".join(f"{number:.0f} {reason}" for reason, number in most_reasons(found).items())


def wholly_untrained(groups: Sequence[Group]) -> dict[str, float]:
    """Return how many rollouts have marked calls and none that is trained, and the mean rewards of these and of the others;
    nothing if there are none. Their rewards count in their groups' means, but no token of theirs gets an advantage."""
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for group in groups:
        for member in group.trajectories:
            marked = any(call.untrained for call in member.transitions)
            rewards[marked and not any(member.of_interest or member.trainable)].append(member.reward)
    if not rewards[True]:
        return {}
    means = {"wholly_untrained/reward": rewards[True], "wholly_untrained/reward_of_others": rewards[False]}
    return {
        "wholly_untrained/rollouts": float(len(rewards[True])),
        **{name: float(np.mean(values)) for name, values in means.items() if values},
    }


def are_untrained(found: Mapping[str, float]) -> str:
    """Say that no call is trained because all are marked, with the cure. `found` are the numbers by reason."""
    return (
        f"the calls that could be trained are marked as untrained ({said_reasons(found)}): look at lightning.untrained and "
        "lightning.reject in the agent, at its headers, and at the rules [untrained.NAME]"
    )


def media_calls(groups: Sequence[Group]) -> list[Transition]:
    """Return the calls of the groups that would be trained if their prompts had no images, audio, video or files."""
    return [
        call
        for group in groups
        for member in group.trajectories
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if trainable and call.status is CallStatus.MEDIA
    ]


def count_too_long(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> int:
    """Return how many calls were refused because prompt and answer did not fit, plus the rollouts that failed by such a
    refusal."""
    failed = sum(rollout.status is Status.FAILED and CURE_OF_LENGTH in rollout.error for rollout in rollouts)
    refused = (call for group in groups for member in group.trajectories for call in member.refused)
    return failed + sum(call.finish_reason == TOO_LONG for call in refused)


def count_truncated(calls: Iterable[Transition]) -> int:
    """Return how many calls ended at the limit of their tokens, and not because the model was done."""
    return sum(call.finish_reason == "length" for call in calls)


def staleness(version: int, batch: Batch) -> dict[str, float]:
    """How many optimizer steps older than `version` the policy was that sampled the trained tokens: mean and maximum over
    those whose version is known, nothing when there are none."""
    versions = [sample.versions[(sample.weights != 0) & (sample.versions >= 0)] for sample in batch.samples]
    known = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    if not len(known):
        return {}
    return {"staleness_mean": float(version - known.mean()), "staleness_max": float(version - known.min())}


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Return the number of response tokens of the groups' calls."""
    return sum(len(call.response_ids) for call in calls_of(groups))


UNTRAINED: Final = "calls_untrained/"
"""What the metrics of untrained calls begin with; the reason follows."""
OTHER: Final = "other"
"""Stands for the reasons of untrained calls beyond the most frequent ones."""
REASONS: Mapping[str, str] = {
    "all_rewards_equal": "all rollouts that were compared earned the same",
    "nothing_to_train": "no call belongs to an agent that is trained",
    "too_few_succeeded": "too few of the rollouts succeeded",
    "too_few_trainable": "too few of the rollouts have calls that can be trained on",
    "margin_too_small": "no two rollouts are further apart than the margin",
    "below_threshold": "no rollout earned enough to be imitated",
    "return_not_finite": "the rewards of a rollout add up to no finite number",
    "advantage_not_finite": "the credit function gave an advantage that is not finite",
    "advantage_too_large": "the credit function gave an advantage that is too large for float32",
    "value_target_not_finite": "the credit function gave the head a target that is not finite",
    "value_target_too_large": "the credit function gave the head a target that is too large for float32",
}
"""Why groups are left out, in words, by the reason under which they are counted."""
ORDINARY = frozenset({"all_rewards_equal", "too_few_succeeded", "margin_too_small", "below_threshold"})
"""Reasons that also occur in a healthy run."""
MOST_NAMES: Final = 20
"""Most callers, or reasons of untrained calls, that a sentence or the metrics of a run name."""
CURE_OF_GREEDY = (
    "the rollouts of a task are then alike, and comparing them teaches nothing. Set a temperature above 0 in the agent, or on "
    "all its calls with --set gateway.override_sampling.temperature=1"
)
CURE_OF_MEDIA = (
    "their prompts have an image, audio, video or a file, and the trainer computes on token ids, which have no pixels. Give "
    "such calls to an agent that is not trained (train_agents), or put what is in the media into the prompt as text"
)


class Remarks:
    """Looks at each step of a run and logs why some of its groups or calls are not trained."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._said = Once()
        self._steps = self._idle = 0

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch,
        metrics: Mapping[str, float],
        train_agents: Sequence[str],
    ) -> None:
        """Look at a step that has been trained. `metrics` are its own, with the engine's `stepped`, if the engine reports
        that."""
        self._steps += 1
        calls = trained_calls(groups)
        # If the step was skipped for its numbers, the engine has reported that.
        idle = not metrics.get("stepped", len(batch.samples)) and not metrics.get("skipped_nonfinite")
        self._idle += idle
        if idle and self._idle & (self._idle - 1) == 0:  # the 1st, 2nd, 4th, 8th ... of them
            self._say_idle(step, groups, batch, calls, train_agents)
        else:
            for reason in sorted(batch.skipped.keys() - self._reasons):
                level = logging.INFO if reason in ORDINARY else logging.WARNING
                logger.log(level, "step %d: %s", step, _why(reason, groups, batch, calls, train_agents))
        self._reasons |= batch.skipped.keys()
        if (media := int(metrics.get("dropped/media", 0))) and calls and self._said.first("media"):
            logger.warning("step %d: %s", step, are_media(media, media + len(calls)))
        if metrics.get("too_long") and self._said.first("too_long"):
            logger.warning("step %d: %s", step, are_too_long(int(metrics["too_long"])))
        earned, others = (metrics.get(f"wholly_untrained/{name}") for name in ("reward", "reward_of_others"))
        if earned is not None and others is not None and earned < others and self._said.first("wholly untrained"):
            logger.warning(
                "step %d: the mean reward of %.0f rollouts is %.3g, and %.3g of the others: these rollouts have calls that are "
                "marked as untrained and none that is trained, so what they did wrong is not unlearned. Look which calls are "
                "marked, and by whom (docs/untrained.md)",
                step,
                metrics["wholly_untrained/rollouts"],
                earned,
                others,
            )

    def _say_idle(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Batch,
        calls: Sequence[Transition],
        train_agents: Sequence[str],
    ) -> None:
        reasons = [_why(reason, groups, batch, calls, train_agents) for reason in sorted(batch.skipped)]
        if not calls and "nothing_to_train" not in batch.skipped:
            reasons.append(_nothing_trained(groups, train_agents))
        logger.warning(
            "step %d trained nothing and left the weights as they were (%d of %d steps so far): %s",
            step,
            self._idle,
            self._steps,
            "; ".join(reasons) or "no trained call got an advantage",
        )


def _why(
    reason: str, groups: Sequence[Group], batch: Batch, calls: Sequence[Transition], train_agents: Sequence[str]
) -> str:
    """Explain a reason for which groups of this step are left out."""
    said = f"{batch.skipped[reason]} of {len(groups)} groups are left out as {reason}"
    if reason in REASONS:
        said += f" ({REASONS[reason]})"
    if reason == "nothing_to_train":
        idle = [group for group in groups if not any(map(trains, group.trajectories))]
        said += f": {_nothing_trained(idle, train_agents)}"
    elif reason == "all_rewards_equal" and are_greedy(count_greedy(calls), len(calls)):
        said += f". Most trained calls were sampled at temperature 0: {CURE_OF_GREEDY}"
    return said


def _nothing_trained(groups: Sequence[Group], train_agents: Sequence[str]) -> str:
    if media := len(media_calls(groups)):
        return are_media(media, media)
    marked = untrained_reasons(calls_of(groups))
    return are_untrained(marked) if marked else nothing_trained(callers_of(groups), train_agents)


def nothing_trained(callers: Iterable[Caller], train_agents: Sequence[str]) -> str:
    """Explain why none of the calls of these callers is trained, with the cure."""
    known = list(callers)
    if not known:
        return "no model call was recorded. Give the agent's client llm.base_url and llm.api_key"
    if not train_agents:
        return f"no call of {names_of(known)} has tokens to train on"
    if all(glob.startswith(f"{NOT}{OF_POLICY}") for glob in train_agents):
        return f"no call of {names_of(known)} has tokens to train on and a policy that is trained"
    meant = [f"did you mean {cure!r} for {glob!r}?" for glob, cure in unmatched(train_agents, known).items() if cure]
    return f"train_agents {list(train_agents)} matches none of the agents seen: {names_of(known)}. " + (
        " ".join(meant) or "A glob has to match a whole path or its last name; '*/planner/*' is all inside planner"
    )


def unmatched(train_agents: Sequence[str], callers: Iterable[Caller]) -> dict[str, str]:
    """Return the globs that match none of the callers, each with the glob that was probably meant; "" if none is similar.

    Only agents that no glob matches are suggested: a glob for an agent that was not called this time is not taken for a
    misspelling of an agent that is trained already.
    """
    known = list(callers)
    globs: dict[str, str] = {}
    for name in sorted({caller.name for caller in known if not is_trainable(caller, train_agents)}):
        *outer, last = name.split("/")
        globs.setdefault(last, last)
        for place, part in enumerate(outer):
            globs.setdefault(part, f"*/{part}/*" if place else f"{part}/*")
    found = {}
    for glob in train_agents:
        if not glob.startswith((OF_MODEL, OF_POLICY, NOT)) and not any(
            is_trainable(caller, (glob,)) for caller in known
        ):
            near = get_close_matches(glob.strip("*/").rpartition("/")[2], globs, n=1)
            found[glob] = globs[near[0]] if near else ""
    return found


def names_of(callers: Iterable[Caller | str]) -> str:
    """List the names of callers, each once, at most `MOST_NAMES`, and how many more there are."""
    names = sorted({caller if isinstance(caller, str) else caller.name for caller in callers})
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + rest


def callers_of(groups: Sequence[Group]) -> set[Caller]:
    """Return the callers of these groups' calls, each once."""
    return {Caller(call.caller.agent, call.caller.path) for call in calls_of(groups)}


def is_greedy(call: Transition) -> bool:
    """Whether a call was sampled at temperature 0."""
    return call.temperature < GREEDY_BELOW


def count_greedy(calls: Iterable[Transition]) -> int:
    """Return how many calls were sampled at temperature 0."""
    return sum(map(is_greedy, calls))


def are_greedy(greedy: int, calls: int) -> bool:
    """Whether most of the calls were sampled at temperature 0."""
    return 2 * greedy > calls


def are_too_long(calls: int) -> str:
    """Say that calls were refused because they are longer than the context, with the cure."""
    return (
        f"{counted(calls, 'call was', 'calls were')} refused, since prompt and answer together are longer than the "
        f"context. {CURE_OF_LENGTH}"
    )


def are_media(media: int, calls: int) -> str:
    """Say that calls are not trained because of their media, with the cure. `calls` is how many would be trained otherwise."""
    return f"{media} of {calls} calls of trained agents are not trained: {CURE_OF_MEDIA}"
