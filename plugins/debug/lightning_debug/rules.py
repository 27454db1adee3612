"""Rules that find what is wrong from the records of some attempts. A dry run, each step of training and a reader of the store
apply the same rules, together with those over the course of a run (`lightning_debug.course_rules`).

The invariant: a rule reads only recorded data, so that it works for any run at any time. Shared memory of rollouts is found by
token ids alone, and only from text that no prompt had before it was answered: a system prompt, a task, a quoted document, or
equal answers to equal prompts do not count.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from lightning.runner.attempt_completion import UNCALLED
from lightning.safe_text import counted
from lightning.trainer.metrics import MOST_NAMES, names_of, unmatched
from lightning.trainer.training_data import NOT, OF_MODEL, is_of_interest
from lightning.types import TOO_LONG, UNNAMED, Caller, CallStatus, TokenIds, Transition, by_key, shared_prefix
from lightning_record.exchanges import packed_in, why_not_replayable

from lightning_debug.course_rules import COURSE_RULES
from lightning_debug.diagnosis import Attempted, Course, Diagnosis, Evidence

if TYPE_CHECKING:
    from lightning_policies.config import PolicyConfig

LONGEST: Final = 300
"""Most characters of a refusal that are shown."""
LEAST_PAIRS: Final = 60
"""Pairs of rollouts of one task with different rewards and lengths that are needed to say that the reward follows length."""
MOST_PAIRS: Final = 0.9
"""If the longer rollout earns more in at least this share of those pairs, the reward is said to follow length. Chance gives
half of the pairs; a reward that also pays for something else stays below."""
MOST_ALIKE: Final = 0.8
"""The same share where the reward has named parts and the two rollouts of each pair are alike in them: no other known reason
is left for the difference."""
SHUFFLES: Final = 1000
"""How often the rewards of each group are shuffled, to see how many pairs chance orders by length."""
UNLIKELY: Final = 0.01
"""A length is only named if at most this share of the shuffles orders as many pairs."""
LEAST_VALUES: Final = 3
"""Rewards of rollouts with equal parts that take fewer values say yes or no to something: they do not grow with length."""
OUTSIDE: Final = re.compile(
    r"connection|timed? ?out|refused|unreachable|unavailable|rate.?limit|quota|unauthori[sz]ed|forbidden"
    r"|(?:http|status|code)\D{0,12}(?:401|403|429|50[0-4])\b",
    re.IGNORECASE,
)
"""Matches errors of a tool that the model's arguments cannot have caused, such as a service that is down."""
TOOL_RUNS: Final = 10
MANY_TOOL_FAILURES: Final = 0.2
"""From this share of failed runs on, of at least `TOOL_RUNS`, a tool's service is reported as failing."""
LEAST_UNEQUAL: Final = 5
MANY_UNEQUAL: Final = 0.05
"""From `LEAST_UNEQUAL` pairs of token-identical rollouts with different rewards on, if they are this share of such pairs, the
grader is reported."""


def diagnose(
    attempts: Iterable[Attempted] = (),
    train_agents: Sequence[str] = (),
    failures: Sequence[str] = (),
    course: Course | None = None,
    policies: Mapping[str, PolicyConfig] | None = None,
) -> list[Diagnosis]:
    """Apply all rules to the attempts of one step or dry run, and to the `course` of the run up to now (None: no course).
    `failures` are the errors of failed rollouts, `policies` the policies by name, if the run has several."""
    evidence = Evidence(list(attempts), train_agents, failures, policies or {})
    found = [diagnosis for rule in RULES for diagnosis in rule(evidence)]
    return found + [diagnosis for rule in COURSE_RULES for diagnosis in rule(course or Course())]


def refused_calls(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find calls that the gateway or vLLM refused, except those that were too long, which is the policy's own fault."""
    causes: defaultdict[tuple[str, str, str], list[Transition]] = defaultdict(list)
    for attempt in evidence.attempts:
        for call in attempt.calls:
            if call.status is CallStatus.REFUSED and call.finish_reason != TOO_LONG:
                message = re.sub(r"\d+", "N", call.error)
                causes[call.caller.name, call.finish_reason, message].append(call)
    for (agent, code, message), calls in causes.items():
        said = calls[0].error if len(calls[0].error) <= LONGEST else f"{calls[0].error[:LONGEST]}…"
        yield Diagnosis(
            f"refused/{agent}/{code}/{message}",
            f"{agent}: {counted(len(calls), 'refused call')} ({code}): {said}",
            serious=True,
        )


def silent_tools(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find tool calls of the model without any reported tool run."""
    asked = [attempt for attempt in evidence.attempts if any(call.tool_calls for call in attempt.calls)]
    if asked and all(event.kind for attempt in evidence.attempts for event in attempt.tool_events):  # nothing ran
        calls = sum(len(call.tool_calls) for attempt in asked for call in attempt.calls)
        yield Diagnosis(
            "silent tools",
            f"the model asked for {counted(calls, 'tool run')}, and no tool run was reported. Mark the tools with "
            "@lightning.tool, or "
            "install the adapter of their framework (lightning adapters); without that no credit can be given for tools",
        )


def failing_tools(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find a tool that fails for reasons that the model cannot cause: its service is down, slow, or refuses."""
    runs = (event for attempt in evidence.attempts for event in attempt.tool_events)
    for name, events in by_key(runs, lambda event: event.name).items():
        errors = [event.error for event in events if event.status == "error" and OUTSIDE.search(event.error)]
        if len(events) >= TOOL_RUNS and len(errors) >= MANY_TOOL_FAILURES * len(events):
            said = Counter(map(last_line, errors)).most_common(1)[0][0]
            yield Diagnosis(
                f"failing tools/{name}",
                f"the tool {name} failed in {len(errors)} of {len(events)} runs, and not by the model's doing ({said}): the "
                "policy learns to avoid it, or learns from noise. Mend its service, or try again within the tool",
                serious=True,
            )


def last_line(error: str) -> str:
    """Return the last line of an error, shortened to 120 characters: of a traceback, the exception."""
    return error.strip().rpartition("\n")[2][:120]


def clamped(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find calls that asked for longer answers than the model's context had room for."""
    calls = [call for call in evidence.answered if call.max_tokens_asked]
    if calls:
        most = max(call.max_tokens_asked for call in calls)
        yield Diagnosis(
            "clamped",
            f"{counted(len(calls), 'call')} asked for more tokens (up to {most}) than policy_server.max_model_len "
            "leaves room for behind "
            "their prompts: each was answered with the room that was left",
        )


def lost_names(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find calls without an agent's name in a run in which other calls have one."""
    calls = [call.caller for call in evidence.answered]
    named = Counter(caller.name for caller in calls if caller.agent != UNNAMED.agent or caller.path)
    unnamed = len(calls) - named.total()
    if named and unnamed:
        yield Diagnosis(
            "lost names",
            f"{unnamed} of {len(calls)} calls have no agent's name, though others have one "
            f"({', '.join(sorted(named)[:MOST_NAMES])}). Put `with lightning.component(NAME)` around the code that makes them",
        )


def unadapted_frameworks(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find calls of a framework without an adapter, so that its agents have no names and its tools are not seen."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for call in evidence.answered:
        if framework := call.caller.unadapted:
            found[framework][call.caller.name] += 1
    for framework, callers in sorted(found.items()):
        yield Diagnosis(
            f"no adapter/{framework}",
            f"{counted(callers.total(), f'call of {framework} has', f'calls of {framework} have')} no name of its "
            "agents, and its tools are not seen: there is no "
            f"adapter for it here. All its agents are {names_of(callers)}. Put `with lightning.component(NAME)` around each "
            "agent and @lightning.tool on the tools, or turn on its OpenTelemetry spans where it has them (lightning adapters)",
        )


def uncalled(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find rollouts that returned a reward without a model call."""
    silent = sum(error.startswith(UNCALLED) for error in evidence.failures)
    if not silent:
        return
    others = sum(any(call.status.answered for call in attempt.calls) for attempt in evidence.attempts)
    yield Diagnosis(
        "no calls",
        f"{counted(silent, 'rollout')} returned a reward with 0 model calls"
        + (
            f", and {others} others called the model. Is it a cache of the agent's client (DSPy and litellm have one), or a "
            "plugin's stage of calls? Switch it off: a rollout that was answered from it teaches nothing"
            if others
            else ". Does the client use llm.base_url and llm.api_key, or a model that gateway.providers sends elsewhere?"
        ),
        serious=True,
    )


def shared_memory(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find rollouts whose prompts contain an answer of another rollout, so that they must share a memory."""
    calls = [attempt.calls for attempt in evidence.attempts]
    if found := shared_answers(calls):
        holder, speaker = next(iter(found.items()))
        yield Diagnosis(
            "shared memory",
            f"prompts of {len(found)} of {len(calls)} rollouts hold what another rollout had answered (that of "
            f"{calls[holder][0].rollout} an answer of {calls[speaker][0].rollout}): rollouts share a memory, such as a "
            "checkpointer with a fixed thread_id or a list at the top of a module. Make it inside the agent, or give each "
            "rollout an id of its own there; runner='process' with runner.rollouts_per_process = 1 gives each a fresh memory",
            serious=True,
        )


def unmatched_agents(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find globs of `train_agents`, and of the policies, that match no call. If none of those of `train_agents` matches any
    call, nothing is found of these here, because that error is reported elsewhere."""
    callers = {Caller(call.caller.agent, call.caller.path) for call in evidence.answered}
    models = {call.requested_model for call in evidence.answered}
    if any(is_of_interest(call, evidence.train_agents) for call in evidence.answered):
        for glob, meant in unmatched(evidence.train_agents, callers).items():
            yield _no_call_of(glob, "train_agents", meant, callers)
    every = [glob for policy in evidence.policies.values() for glob in policy.agents if not glob.startswith(NOT)]
    missed = unmatched(every, callers) if callers else {}
    for name, policy in evidence.policies.items():
        for glob in policy.agents:
            if glob in missed:
                yield _no_call_of(glob, f"policies.{name}.agents", missed[glob], callers)
        for glob in policy.models:
            if models and not any(_matches(model, (glob,)) for model in models):
                setting = f"policies.{name}.models"
                text = f"no call matched {glob!r} of {setting}. Models that were asked for: {names_of(models)}"
                yield Diagnosis(f"glob/{setting}/{glob}", text, minor=True)


def requested_models(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find calls for several model names, which the policy all answers, and say which name looks like a judge's: all its calls
    came after the last tool run. A name that the settings give to a policy is left out."""
    given = [glob for policy in evidence.policies.values() for glob in policy.models]
    asked: defaultdict[str, Counter[str]] = defaultdict(Counter)
    early: set[str] = set()  # asked for before the last tool of an attempt ran
    late: Counter[str] = Counter()
    for attempt in evidence.attempts:
        last = max((event.at for event in attempt.tool_events), default=0.0)
        for call in attempt.calls:
            if call.status.answered and call.requested_model and not _matches(call.requested_model, given):
                asked[call.requested_model][call.caller.name] += 1
                early |= {call.requested_model} if call.started_at < last else set()
        late.update({call.requested_model for call in attempt.calls if last and call.started_at >= last})
    if len(asked) < 2:
        return
    for model, callers in sorted(asked.items()):
        who = ", ".join(f"{name} ({count})" for name, count in callers.most_common(MOST_NAMES))
        judge = bool(early) and model not in early and 2 * late[model] > len(evidence.attempts)
        yield Diagnosis(
            f"model/{model}/{'late' if judge else ''}",
            f"{counted(callers.total(), 'call')} asked for the model {model!r}: {who}. The policy answers them, as "
            "it does under any name"
            + (", and all of them came after the last tool: is it a judge" if judge else "")
            + f"{'?' if judge else '.'} To leave them out of training: train_agents={[f'{NOT}{OF_MODEL}{model}']}; to have a "
            "provider answer them: models of gateway.providers",
        )


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _no_call_of(glob: str, setting: str, meant: str, callers: Iterable[Caller]) -> Diagnosis:
    """Return the finding for a glob of a setting that matches nothing. `meant` is the agent that was probably meant; empty if
    none is similar."""
    cure = f"did you mean {meant!r}?" if meant else "is it misspelt, or is that agent only called now and then?"
    text = f"no call matched {glob!r} of {setting}; {cure} Agents seen: {names_of(callers)}"
    return Diagnosis(f"glob/{setting}/{glob}", text, serious=bool(meant), minor=not meant)


def not_replayable(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find attempts that cannot be replayed from their record, by reason. Attempts without any recorded request are skipped."""
    recorded = [each for each in evidence.attempts if any(packed_in(call) is not None for call in each.calls)]
    reasons = Counter(why_not_replayable(attempt.calls, attempt.tool_events) for attempt in recorded)
    for reason, count in sorted(reasons.items()):
        if reason:
            yield Diagnosis(
                f"not replayable/{reason}",
                f"{count} of {len(evidence.attempts)} rollouts cannot be run again from the record: {reason}",
                minor=True,
            )


LENGTHS: Final[tuple[tuple[str, str, Callable[[Attempted], int]], ...]] = (
    ("longer one", "the length of what is said", lambda one: sum(len(call.response_ids) for call in one.calls)),
    ("one with the longer last answer", "the length of the last answer", lambda one: len(one.calls[-1].response_ids)),
    ("one with more calls", "the number of calls", lambda one: len(one.calls)),
)
"""Lengths that a reward should not follow: the rollout that has more of it, its name, and its value (in tokens or calls)."""


FOLLOWS_LENGTH: Final = "reward follows length"
"""The cause of the finding about a reward that follows length."""


def reward_follows_length(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find a reward that follows length: of two rollouts of one task, the longer one nearly always earns more.

    Only pairs with equal named parts of the reward count, because a part such as correctness explains the other pairs as well,
    and only where the reward takes several values beside these parts: two are right and wrong. Of the `LENGTHS` the one that
    orders the most pairs is named. Rewards that are shuffled within each group say how often chance orders as many.
    """
    known = [each for each in evidence.attempts if each.reward is not None and each.group and each.calls]
    kinds = by_key(known, lambda each: tuple(sorted(each.parts.items()))).values()
    graded = [own for own in kinds if len({each.reward for each in own}) >= LEAST_VALUES]
    alike = [group for own in graded for group in by_key(own, lambda each: each.group).values()]
    parts = sorted({name for group in alike for name in group[0].parts})
    most = MOST_ALIKE if parts else MOST_PAIRS
    rewards = [np.array([each.reward for each in own], dtype=np.float64) for own in alike]
    found = []
    for longer, name, length in LENGTHS:
        lengths = [np.array(list(map(length, own))) for own in alike]
        agree, pairs = _ordered(rewards, lengths)
        if pairs < LEAST_PAIRS or agree < most * pairs:
            continue
        if (by_chance := _as_ordered(rewards, lengths)) <= UNLIKELY:
            found.append((agree / pairs, agree, pairs, longer, name, by_chance))
    if found:
        share, agree, pairs, longer, name, by_chance = max(found, key=itemgetter(0))
        equal = f" with equal {', '.join(parts)}" if parts else ""
        yield Diagnosis(
            FOLLOWS_LENGTH,
            f"the reward follows {name}: of {pairs} pairs of rollouts of one task{equal} that earned differently, the {longer} "
            f"earned more in {agree} ({share:.0%}). From {most:.0%} on this is an alarm; shuffled rewards give as many in "
            f"{SHUFFLES * by_chance:.0f} of {SHUFFLES} cases. Is that meant? "
            "`lightning reward try GRADER RUN` shows what another reward would pay",
        )


def _ordered(rewards: Sequence[npt.NDArray[np.float64]], lengths: Sequence[npt.NDArray[np.int64]]) -> tuple[int, int]:
    """Return in how many pairs within the groups the longer rollout earned more, and how many pairs differ in both. Each array
    has one value for each rollout of a group."""
    agree = pairs = 0
    for own, said in zip(rewards, lengths, strict=True):
        both = np.sign(own[:, None] - own[None, :]) * np.sign(said[:, None] - said[None, :])
        agree, pairs = agree + int((both > 0).sum()) // 2, pairs + int((both != 0).sum()) // 2
    return agree, pairs


def _as_ordered(rewards: Sequence[npt.NDArray[np.float64]], lengths: Sequence[npt.NDArray[np.int64]]) -> float:
    """Return the share of shuffles of the rewards within each group that order the pairs as well as the rewards do."""
    draws = np.random.default_rng(0)
    shuffled = np.zeros(SHUFFLES)
    for own, said in zip(rewards, lengths, strict=True):
        longer = np.sign(said[:, None] - said[None, :])
        orders = draws.permuted(np.tile(own, (SHUFFLES, 1)), axis=1)
        orders[0] = own  # the order that was seen counts, so that the share is never 0
        for row, order in enumerate(orders):
            shuffled[row] += float((np.sign(order[:, None] - order[None, :]) * longer).sum()) / 2
    return float(np.mean(shuffled >= shuffled[0]))


def unable_tools(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find that all rollouts of several tasks earned the same while most of them had a failed tool run."""
    known = [each for each in evidence.attempts if each.reward is not None]
    failed = [each for each in known if any(event.status == "error" for event in each.tool_events)]
    groups = {each.group for each in known}
    if len(groups) < 2 or len({each.reward for each in known}) > 1 or 2 * len(failed) <= len(known):
        return
    errors = Counter(
        f"{event.name} failed with {last_line(event.error)!r}"
        for each in failed
        for event in each.tool_events
        if event.status == "error"
    )
    said, times = errors.most_common(1)[0]
    yield Diagnosis(
        "unable tools",
        f"all {len(known)} rollouts of {len(groups)} tasks earned {known[0].reward:.3f}, and {len(failed)} of them had a "
        f"failed tool run (most often {said}, {counted(times, 'time')}): the tool may not be able to do these tasks. Nothing "
        "is learned from rollouts that earn the same",
    )


def unequal_grades(evidence: Evidence) -> Iterator[Diagnosis]:
    """Find a random grader: rollouts of one task that are equal token for token have different rewards."""
    groups: defaultdict[tuple[str, bytes], list[tuple[float, str]]] = defaultdict(list)
    for attempt in evidence.attempts:
        if attempt.reward is not None and attempt.group and attempt.calls:
            said = hashlib.sha256()
            for call in attempt.calls:
                for ids in (call.prompt_ids, call.response_ids):
                    said.update(len(ids).to_bytes(4))
                    said.update(ids)
            groups[attempt.group, said.digest()].append((attempt.reward, attempt.calls[0].rollout))
    pairs = [pair for rewards in groups.values() for pair in combinations(rewards, 2)]
    differ = [(one, other) for (reward, one), (its, other) in pairs if reward != its]
    if len(differ) >= LEAST_UNEQUAL and len(differ) >= MANY_UNEQUAL * len(pairs):
        yield Diagnosis(
            "unequal grades",
            f"{len(differ)} of {len(pairs)} pairs of rollouts of one task that are alike in every token earned different "
            "rewards: the grader judges the same conversation now so, now otherwise. What it adds by chance is learned, too. "
            "Make it depend on the conversation alone, or take the mean of several gradings",
            serious=True,
            rollouts=differ[0],
        )


RULES: Final[tuple[Callable[[Evidence], Iterator[Diagnosis]], ...]] = (
    unmatched_agents,
    refused_calls,
    uncalled,
    shared_memory,
    silent_tools,
    failing_tools,
    clamped,
    requested_models,
    lost_names,
    unadapted_frameworks,
    unable_tools,
    reward_follows_length,
    unequal_grades,
    not_replayable,
)


LENGTH: Final = 20
"""Number of consecutive tokens that two texts do not share by chance."""
MOST_ROLLOUTS: Final = 64
"""Most rollouts that are compared: the first ones, since a shared memory shows early."""
FACTORS: Final = np.random.default_rng(12).integers(1, 2**63, LENGTH, dtype=np.uint64) | np.uint64(1)
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Said:
    """The first answer with a given sequence of tokens: when the call ended, the rollout's index, and the call."""

    at: float
    speaker: int
    call: Transition


def shared_answers(rollouts: Sequence[Sequence[Transition]]) -> dict[int, int]:
    """Find rollouts with a prompt that contains an earlier answer of another rollout; return, by index, that other rollout.

    `rollouts` has the calls of each rollout, answered or not. In prompts before a rollout's first answer, any such text counts.
    In later prompts only plain text of rollouts with another task counts, because a chat template rewrites a rollout's own tool
    calls, perhaps just as another rollout wrote them.
    """
    answered = [[call for call in calls if call.status.answered] for calls in rollouts[:MOST_ROLLOUTS]]
    if sum(map(bool, answered)) < 2:
        return {}
    prompts = [(who, call, _hashes(ids)) for who, calls in enumerate(answered) for call, ids in further(calls)]
    said, own = _spoken(answered, np.sort(np.concatenate([hashes for _, _, hashes in prompts])))
    firsts = [min((call.ended_at for call in calls), default=0.0) for calls in answered]
    held, holders = _held(prompts, said, firsts)
    found: dict[int, int] = {}
    for number, spoken in said.items():
        if number not in held or held[number] < spoken.at:
            continue
        for who, first in holders[number]:
            if who == spoken.speaker:
                continue
            same_task = answered[who][0].prompt_ids == answered[spoken.speaker][0].prompt_ids
            if first or not (spoken.call.tool_calls or same_task or number in own[who]):
                found.setdefault(who, spoken.speaker)
    return found


def _spoken(answered: Sequence[Sequence[Transition]], seen: Hashes) -> tuple[dict[int, _Said], list[set[int]]]:
    """Return, for each token sequence (by hash) of an answer that is also `seen` in a prompt, the first answer with it; and the
    sequences that each rollout answered."""
    said: dict[int, _Said] = {}
    own: list[set[int]] = [set() for _ in answered]
    for who, calls in enumerate(answered):
        for call in calls:
            hashes = _hashes(call.response_ids)
            for number in _among(hashes, seen).tolist():
                own[who].add(number)
                if number not in said or call.ended_at < said[number].at:
                    said[number] = _Said(call.ended_at, who, call)
    return said, own


def _held(
    prompts: Sequence[tuple[int, Transition, Hashes]], said: dict[int, _Said], firsts: Sequence[float]
) -> tuple[dict[int, float], dict[int, set[tuple[int, bool]]]]:
    """Return, for each answered token sequence (by hash), when a prompt first had it; and the rollouts whose prompts have it,
    each with whether the call began before that rollout's first answer."""
    held: dict[int, float] = {}
    holders: dict[int, set[tuple[int, bool]]] = {}
    wanted = np.sort(np.fromiter(said, dtype=np.uint64, count=len(said)))
    for who, call, hashes in prompts:
        for number in _among(hashes, wanted).tolist():
            held[number] = min(held.get(number, call.started_at), call.started_at)
            holders.setdefault(number, set()).add((who, call.started_at < firsts[who]))
    return held, holders


def further(calls: Sequence[Transition]) -> Iterator[tuple[Transition, TokenIds]]:
    """Yield the calls of a rollout with their prompts, each without the sequences that the prompt of the agent's call before
    begins with, too. So the cost grows with the length of a conversation, not with its square."""
    before: dict[str, bytes] = {}
    for call in calls:
        packed = call.prompt_ids.tobytes()
        known = shared_prefix(packed, before.get(call.caller.name, b""), call.prompt_ids.itemsize)
        before[call.caller.name] = packed
        yield call, call.prompt_ids[max(0, known - LENGTH + 1) :]


def _among(hashes: Hashes, known: Hashes) -> Hashes:
    """Return those of the hashes that are among the `known` ones, which are sorted."""
    there: npt.NDArray[np.bool_] = np.searchsorted(known, hashes, "right") > np.searchsorted(known, hashes)
    return hashes[there]


def _hashes(ids: TokenIds) -> Hashes:
    """Return one hash for each sequence of `LENGTH` consecutive tokens."""
    tokens = np.asarray(ids, dtype=np.int64).astype(np.uint64) + np.uint64(1)
    if len(tokens) < LENGTH:
        return np.empty(0, dtype=np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH)
    mixed: Hashes = (rows * FACTORS).sum(axis=1, dtype=np.uint64)
    return mixed ^ (mixed >> np.uint64(29))
