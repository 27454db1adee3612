"""A rollout: what happened when, what was said, what it earned, and why each token of a call was pushed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from lightning.batch.branches import is_void
from lightning.errors import DataError
from lightning.trainer.reasons import reason
from lightning.types import Status

from lightning_console.address import Address
from lightning_console.blocks import (
    Block,
    Cell,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Measure,
    Message,
    Messages,
    Notice,
    Notices,
    Page,
    Reason,
    Span,
    Table,
    Timeline,
    TokenStrip,
    Tone,
)
from lightning_console.pages.branches import (
    branch_cells,
    branch_columns,
    branch_it,
    branches_table,
    by_call,
    inherited_rows,
    named,
    origin_facts,
)
from lightning_console.pages.words import NONE, count, located, number, place_of, seconds, to, trail, written
from lightning_console.places import Located, Places
from lightning_console.queries.proof import StepProof
from lightning_console.queries.rollouts import PROMPT_TOKENS, CallLine, RolloutView, Tokens, rollout_view

TONES: Final[dict[str, Tone]] = {
    "error": "bad",
    "aborted": "bad",
    "refused": "bad",
    "blocked": "warn",
    "unknown": "muted",
}
NO_ENTROPY: Final = "the entropy of single tokens is not recorded: the run's page has its mean over each step"
NO_RATIO: Final = "the trainer's logprobs of single tokens are not recorded: the run's page has the step's gap"
LONGEST_ERROR: Final = 4_000


async def page(places: Places, address: Address) -> Page:
    """The page of a rollout."""
    found = await located(places, address)
    if len(address.about) < 2:
        raise DataError("the address of a rollout is rollout/RUN/ROLLOUT")
    view = await rollout_view(
        found,
        address.about[1],
        call=address.number("call", 0),
        attempt=address.number("attempt", 0),
        prompt=address.number("prompt", PROMPT_TOKENS),
        patience=places.patience,
    )
    blocks: list[Block] = [_facts(found, view), *_words(view)]
    if view.attempts > 1:
        choices = [(str(each), f"attempt {each}") for each in range(1, view.attempts + 1)]
        chosen = Control("attempt", "attempt", str(view.rollout.attempt), choices)
        blocks.append(Controls(str(address.having(call=None)), [chosen]))
    if view.calls:
        blocks.append(_timeline(address, view))
    numbers = {line.at: _call(address, line.at) for line in view.branches}
    blocks += [_rewards(view), *_calls(address, view), *branches_table(view, numbers)]
    blocks += [*_tokens(address, view), *_messages(address, view), _commands(found, view), *branch_it(found, view)]
    last = len(view.calls)
    return Page(
        str(address),
        f"Rollout {view.rollout.id}",
        [block for block in blocks if block is not None],
        trail(found, *_above(found, view)),
        live=view.live,
        previous=_call(address, view.chosen - 1) if view.chosen > 1 else "",
        next=_call(address, view.chosen + 1) if 0 < view.chosen < last else "",
    )


def _above(found: Located, view: RolloutView) -> list[Link]:
    links = []
    if view.proof.record is not None:
        links.append(Link(f"step {view.proof.record.step}", to("step", found.key, view.proof.record.step)))
    return [*links, Link(f"group {view.rollout.group}", to("group", found.key, view.rollout.group))]


def _call(address: Address, call: int) -> str:
    return str(address.having(call=call))


def _facts(found: Located, view: RolloutView) -> Facts:
    rollout, current = view.rollout, view.rollout.attempt == view.attempts
    facts = [Fact("task", rollout.task.id, written(rollout.task.input), to=to("group", found.key, rollout.group))]
    facts += origin_facts(view)
    if rollout.task.expected is not None:
        facts.append(Fact("expected", written(rollout.task.expected, 60), "what the grader is given"))
    tone: Tone = "bad" if rollout.status is Status.FAILED else "good" if rollout.status is Status.SUCCEEDED else ""
    fault = f"fault: {rollout.fault}" if rollout.fault else ""
    facts.append(Fact("status", str(rollout.status), fault, tone) if current else Fact("attempt", str(rollout.attempt)))
    if current:
        parts = ", ".join(f"{name} {number(value)}" for name, value in rollout.rewards.items())
        facts.append(Fact("reward", number(rollout.reward), parts))
        facts.append(Fact("seconds", seconds(rollout.seconds) if rollout.status.ended else NONE))
    versions = sorted({run.version for call in view.calls for run in call.transition.versions})
    if versions:
        span = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        step = view.proof.record.step if view.proof.record is not None else None
        facts.append(Fact("policy version", span, "" if step is None else f"looked at by step {step}"))
    sampled = sum(len(call.transition.response_ids) for call in view.calls)
    given = sum(len(call.transition.prompt_ids) for call in view.calls if not call.transition.choice)
    facts.append(Fact("tokens", count(sampled), f"sampled, {count(given)} of prompts"))
    trained = sum(len(call.transition.response_ids) for call in view.calls if call.credit is not None)
    facts.append(Fact("trained tokens", count(trained), _said_proof(view.proof)))
    for name, version in view.rollout.resources.items():
        facts.append(Fact(name, f"version {version}", to=to("resources", name, to=version)))
    if len(view.siblings) > 1 and view.beginning is None:
        facts.append(Fact("in its group", f"{rollout.index + 1} of {len(view.siblings)}", to=_sibling(found, view)))
    return Facts(facts)


def _sibling(found: Located, view: RolloutView) -> str:
    place = view.siblings.index(view.rollout.id) if view.rollout.id in view.siblings else -1
    return to("rollout", found.key, view.siblings[(place + 1) % len(view.siblings)])


def _said_proof(proof: StepProof) -> str:
    return {True: "proved by the step's digest", False: "not what the step recorded", None: "not derived"}[proof.proved]


def _words(view: RolloutView) -> list[Block]:
    notices = []
    if view.rollout.error and view.rollout.attempt == view.attempts:
        why = str(reason(view.rollout.error))
        said = why if is_void(view.rollout) else f"it failed: {why}"
        notices.append(Notice(said, "bad", view.rollout.error[:LONGEST_ERROR]))
    if view.empty:
        notices.append(Notice(f"nothing was said: {view.empty}", "muted"))
    if view.texts:
        notices.append(Notice(f"some messages are not as they were sent: {view.texts}", "muted"))
    if view.proof.proved is False:
        notices.append(Notice(f"advantages are not proved: {view.proof.why}", "bad"))
    return [Notices(notices)] if notices else []


def _timeline(address: Address, view: RolloutView) -> Timeline:
    spans = [
        Span(
            each.lane,
            each.kind,
            each.name,
            each.begin,
            each.end,
            TONES.get(each.status, ""),
            " ".join(filter(None, [each.status if each.kind == "tool" else "", each.detail])),
            _call(address, each.call) if each.call else "",
            selected=each.kind == "call" and each.call == view.chosen,
        )
        for each in view.lanes.moments
    ]
    note = "a tool is drawn from the answer that asked for it to its end: when it began is not recorded"
    return Timeline(view.lanes.lanes, spans, view.lanes.seconds, title="What ran when", note=note)


def _rewards(view: RolloutView) -> Table:
    rollout, rows = view.rollout, []
    numbers = {call.transition.id: call.number for call in reversed(view.calls)}
    if rollout.attempt == view.attempts:
        for name, value in rollout.rewards.items():
            rows.append([Cell(name), Cell(number(value)), Cell("part"), Cell("returned by the agent")])
        if rollout.reward is not None:
            total = "the sum or other total of its parts" if rollout.rewards else "returned by the agent"
            rows.append([Cell("reward"), Cell(number(rollout.reward)), Cell("outcome"), Cell(total)])
    for given in view.step_rewards:
        call = numbers.get(given.response_id)
        rows.append(
            [
                Cell(given.name),
                Cell(number(given.value)),
                Cell("inside the rollout"),
                Cell(f"lightning.reward, for call {call}" if call else "lightning.reward"),
            ]
        )
    credit = view.proof.members.get(rollout.id)
    if credit is not None and rollout.attempt == view.attempts:
        more = credit.total - credit.reward - sum(each.value for each in view.step_rewards)
        if abs(more) > 1e-9:
            rows.append(
                [Cell("rules"), Cell(number(more)), Cell("the algorithm's"), Cell("tool_reward and overlong_penalty")]
            )
        rows.append(
            [Cell("return"), Cell(number(credit.total)), Cell("all of it"), Cell("what rollouts are compared by")]
        )
    empty = "it has no reward: " + (f"fault of {rollout.fault}" if rollout.fault else "it has not ended")
    columns = [Column("name"), Column("value", "number"), Column("kind"), Column("from")]
    note = f"the agent and its grader: {agent}" if (agent := _agent(view)) else ""
    return Table(columns, rows, title="How it was rewarded", note=note, empty=empty)


def _agent(view: RolloutView) -> str:
    agent = view.run.config.get("agent")
    return agent if isinstance(agent, str) else ""


def _calls(address: Address, view: RolloutView) -> list[Block]:
    if not view.calls and view.beginning is None:
        return []
    branches = by_call(view)
    rows = [
        [
            Cell(str(each.number), _call(address, each.number)),
            Cell(each.transition.caller.name),
            Cell(str(each.transition.status), tone=TONES.get(str(each.transition.status), "")),
            Cell(each.transition.finish_reason),
            Cell(count(len(each.transition.prompt_ids))),
            Cell(count(len(each.transition.response_ids))),
            Cell(number(each.credit.advantage) if each.credit else NONE, tone=_tone(each), hint=each.untrained),
            *(branch_cells(branches.get(each.number, ())) if branches else ()),
        ]
        for each in view.calls[max(0, view.chosen - 100) : view.chosen + 100]
    ]
    columns = [
        Column("call", "number"),
        Column("agent"),
        Column("status"),
        Column("ended by"),
        Column("prompt tokens", "number"),
        Column("answer tokens", "number"),
        Column("advantage", "number"),
        *(branch_columns() if branches else ()),
    ]
    note = f"{len(view.calls)} calls, those around the chosen one are shown" if len(rows) < len(view.calls) else ""
    rows = [*inherited_rows(view, len(columns)), *rows]
    keys = [row[0].text for row in rows]
    selected = [str(view.chosen)] if view.chosen else []
    return [Table(columns, rows, keys=keys, selected=selected, title="Calls", note=note)]


def _tone(line: CallLine) -> Tone:
    return "" if line.credit is None or not line.credit.advantage else "good" if line.credit.advantage > 0 else "bad"


def _tokens(address: Address, view: RolloutView) -> list[Block]:
    if view.tokens is None:
        return []
    line, tokens = view.calls[view.chosen - 1], view.tokens
    notes = [tokens.missing]
    if tokens.answer_left_out:
        notes.append(f"{count(tokens.answer_left_out)} tokens of the answer behind these are not shown")
    whole = tokens.left_out + tokens.prompt
    strip = TokenStrip(
        tokens.texts,
        tokens.prompt,
        _measures(line, tokens),
        _why(view, line),
        prompt_left_out=tokens.left_out,
        title=f"Tokens of call {line.number}, by {line.transition.caller.name}",
        note="; ".join(filter(None, notes)),
    )
    if whole <= PROMPT_TOKENS:
        return [strip]
    sizes = dict.fromkeys(str(size) for size in (PROMPT_TOKENS, 4_096, whole) if size <= whole)
    value = address.option("prompt", str(PROMPT_TOKENS))
    labels = [(size, "all of it" if int(size) == whole else f"the last {count(int(size))} tokens") for size in sizes]
    return [Controls(_call(address, line.number), [Control("prompt", "prompt", value, labels)]), strip]


def _measures(line: CallLine, tokens: Tokens) -> list[Measure]:
    nothing = [None] * len(tokens.texts)
    unsampled = "the policy server gave no logprobs" if not len(line.transition.logprobs) else ""
    untrained = "" if line.credit is not None else line.untrained
    return [
        Measure("advantage", tokens.advantages, "diverging", missing=untrained),
        Measure("logprob", tokens.logprobs, unit="nats", missing=unsampled),
        Measure("version", tokens.versions),
        Measure("trained", tokens.trained),
        Measure("entropy", nothing, unit="nats", missing=NO_ENTROPY),
        Measure("sampler/trainer ratio", nothing, "diverging", missing=NO_RATIO),
    ]


def _why(view: RolloutView, line: CallLine) -> list[Reason]:
    """From the reward to the push of each token of the call's answer."""
    proof = view.proof
    member = proof.members.get(view.rollout.id)
    if line.credit is None or member is None or proof.record is None:
        return [Reason("pushed", "no", line.untrained, None)]
    algorithm, step, proved = proof.algorithm, proof.record.step, proof.proved
    mean, deviation, size = proof.groups.get(view.rollout.group, (member.total, 0.0, 1))
    credit = getattr(algorithm, "credit", "")
    named = credit if isinstance(credit, str) else type(credit).__name__
    reasons = [Reason("reward", number(member.reward, 4), "stored; in the rollout's digest", member.recorded)]
    if abs(member.total - member.reward) > 1e-9:
        reasons.append(
            Reason("return", number(member.total, 4), "with what its calls and tools earned", member.recorded)
        )
    if line.credit.own:
        reasons.append(Reason("this call's own", number(line.credit.own, 4), "its step rewards", member.recorded))
    compared = f"mean {number(mean, 4)}, deviation {number(deviation, 4)} of {size} returns"
    how = f"{getattr(algorithm, 'low_level', algorithm.name if algorithm else '')}, credit {named}"
    normalised = str(getattr(algorithm, "normalization", "the algorithm's"))
    return [
        *reasons,
        Reason("group", compared, "the returns that it is compared with", proved),
        Reason("advantage", f"{line.credit.advantage:+.5g}", how, proved),
        Reason("weight", f"{line.credit.weight:.4g}", f"share of each token in step {step}: {normalised}", proved),
        Reason("push", f"{line.credit.push:+.4g}", "advantage × weight, on each token's logprob", proved),
        *_clip(proof),
    ]


def _clip(proof: StepProof) -> Sequence[Reason]:
    """What may still have held a token back: known over the step only, since the trainer's logprobs are not stored."""
    metrics = proof.record.metrics if proof.record is not None else {}
    low, high = getattr(proof.algorithm, "clip_low", None), getattr(proof.algorithm, "clip_high", None)
    found = []
    if isinstance(low, float) and isinstance(high, float):
        share = metrics.get("clip_fraction")
        known = "" if share is None else f"; {100 * share:.2g} % of the step's tokens were clipped"
        source = f"whether this token was depends on the trainer's logprob, which is not stored{known}"
        found.append(Reason("clip", f"ratio to [{1 - low:.4g}, {1 + high:.4g}]", source))
    correction = getattr(proof.algorithm, "correction", None)
    if correction is not None and getattr(correction, "kind", "none") != "none":
        share = metrics.get("masked_share")
        known = "" if share is None else f"; {100 * share:.2g} % of the step's tokens were masked"
        bounds = f"{correction.kind}, rho in [{correction.low:g}, {correction.high:g}]"
        found.append(Reason("mask", bounds, f"depends on the trainer's logprob as well{known}"))
    return found


def _messages(address: Address, view: RolloutView) -> list[Block]:
    if not view.lines:
        return []
    messages = [
        Message(
            line.role,
            line.text,
            ", ".join(filter(None, [line.who, line.tag, line.missing])),
            line.data,
            "warn" if line.missing else "",
            _call(address, line.call) if line.call else "",
        )
        for line in view.lines
    ]
    note = f"{count(view.lines_left_out)} later messages are not shown" if view.lines_left_out else ""
    return [Messages(messages, title="What was said", note=note)]


def _commands(found: Located, view: RolloutView) -> Notices:
    command = f"lightning replay {shlex.quote(view.rollout.id)} {named(view.agent)} --runs {place_of(found)}"
    if view.rollout.attempt != view.attempts:
        command += f" --attempt {view.rollout.attempt}"
    commands = [command]
    if view.chosen:
        commands.append(f"{command} --until {view.before}")
    text = "run its agent again from the record, without a model; or up to the chosen call"
    return Notices([Notice(text, commands=commands if view.calls else ())], title="Replay it")
