"""The page of a rollout: its timeline, conversation, rewards, the push of each token of a call and why, and its branches."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from lightning.errors import DataError
from lightning.losses.protocol import name_of
from lightning.trainer.summary import reason
from lightning.types import POLICY, Json, Transition, by_key
from lightning_branching.recorded import is_void

from lightning_console.blocks import (
    Action,
    Actions,
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
from lightning_console.glossary import explained
from lightning_console.pages.audits import audited_calls
from lightning_console.pages.policies import versions_of
from lightning_console.pages.rewards import Trial, trials_of
from lightning_console.pages.tools import more_links
from lightning_console.pages.words import (
    LONGEST_TITLE,
    NONE,
    count,
    ending_of,
    inside,
    located,
    mean_of,
    number,
    place_of,
    seconds,
    step_links,
    task_text,
    title_of,
    to,
    tone_of,
    trail,
    written,
)
from lightning_console.places import Located, Places
from lightning_console.queries.branches import is_sample
from lightning_console.queries.conversation import LONGEST, cut, one_line
from lightning_console.queries.rollouts import (
    MARKED,
    PROMPT_TOKENS,
    BranchLine,
    CallLine,
    RolloutView,
    Tokens,
    rollout_view,
)
from lightning_console.queries.steps import StepProof
from lightning_console.router import Address

TONES: Final[dict[str, Tone]] = {
    "error": "bad",
    "aborted": "bad",
    "refused": "bad",
    "blocked": "warn",
    "unknown": "muted",
    MARKED: "muted",
}
PROOFS: Final = {True: "proved", False: "not the recorded ones", None: "not derived"}
NO_ENTROPY: Final = "the entropy of single tokens is not recorded: the run's page has its mean over each step"
NO_RATIO: Final = "the trainer's logprobs of single tokens are not recorded: the run's page has the step's gap"
LONGEST_ERROR: Final = 4_000


async def page(places: Places, address: Address) -> Page:
    """Make the page `rollout/RUN/ROLLOUT?call=&attempt=&prompt=`. A person may type `rollout/RUN?id=2/4/7`, without the run."""
    found = await located(places, address)
    if given := address.option("id").strip():
        whole = given if given.startswith(f"{found.run.id}/") else f"{found.run.id}/{given}"
        address = Address("rollout", (address.about[0], whole), address.having(id=None).options)
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
    task = task_text(view.rollout.task.input)
    if len(task) > LONGEST_TITLE:
        blocks.append(Messages([Message("user", cut(written(view.rollout.task.input, LONGEST)))], title="Task"))
    if view.attempts > 1:
        choices = [(str(each), f"attempt {each}") for each in range(1, view.attempts + 1)]
        chosen = Control("attempt", "attempt", str(view.rollout.attempt), choices)
        blocks.append(Controls(str(address.having(call=None)), [chosen]))
    if view.calls:
        blocks.append(_timeline(address, view))
    numbers = {line.at: _call(address, line.at) for line in view.branches}
    blocks += [*_messages(address, view), _rewards(view, trials_of(found)), *_calls(address, view)]
    blocks += audited_calls(view, {each.number: _call(address, each.number) for each in view.calls})
    blocks += [*branches_table(view, numbers), *_tokens(address, view), more_links(found, rollout=view.rollout.id)]
    blocks += [*_commands(found, view), *branch_it(found, view)]
    group = Link(f"group {inside(found, view.rollout.group)}", to("group", found.key, view.rollout.group))
    return Page(
        str(address),
        title_of(view.rollout),
        blocks,
        trail(found, *step_links(found, view.proof.record), group),
        live=view.live,
        previous=_call(address, view.chosen - 1) if view.chosen > 1 else "",
        next=_call(address, view.chosen + 1) if 0 < view.chosen < len(view.calls) else "",
        name=view.rollout.id,
    )


def _call(address: Address, call: int) -> str:
    return str(address.having(call=call))


def _facts(found: Located, view: RolloutView) -> Facts:
    rollout, current = view.rollout, view.rollout.attempt == view.attempts
    facts = [_reward_fact(view), _ending_fact(view)] if current else [Fact("attempt", str(rollout.attempt))]
    if rollout.task.expected is not None:
        facts.append(Fact("expected", one_line(task_text(rollout.task.expected), 60), "given to the grader"))
        last = next((line for line in reversed(view.lines) if line.made and line.text), None)
        if last is not None:
            facts.append(Fact("answered", one_line(last.text, 60), f"the last answer, in call {last.call}"))
    facts += origin_facts(view)
    if current:
        facts.append(Fact("seconds", seconds(rollout.seconds) if rollout.status.ended else NONE))
    if span := versions_of(call.transition for call in view.calls):
        step = view.proof.record.step if view.proof.record is not None else None
        facts.append(Fact("policy version", span, "" if step is None else f"used by step {step}"))
    sampled = sum(len(call.transition.response_ids) for call in view.calls)
    given = sum(len(call.transition.prompt_ids) for call in view.calls if not call.transition.choice)
    facts.append(Fact("tokens", count(sampled), f"written by the model; prompts have {count(given)}"))
    trained = sum(len(call.transition.response_ids) for call in view.calls if call.credit is not None)
    why = view.proof.why if view.proof.proved is None else ""
    facts.append(Fact("trained tokens", count(trained), one_line(why, 90) or PROOFS[view.proof.proved]))
    for name, version in view.rollout.resources.items():
        facts.append(Fact(name, f"version {version}", to=to("resources", name, to=version)))
    if len(view.siblings) > 1 and view.beginning is None:
        facts.append(Fact("in its group", f"{rollout.index + 1} of {len(view.siblings)}", to=_sibling(found, view)))
    return Facts(facts)


def _reward_fact(view: RolloutView) -> Fact:
    """Return the reward beside those of the group: ▲ for the best of different ones, ▼ for the least. Neither says that the
    answer is right or wrong."""
    rollout = view.rollout
    known = [each.reward for each in view.siblings if each.reward is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    tone: Tone = ""
    said = [", ".join(f"{name} {number(value)}" for name, value in rollout.rewards.items() if name != "reward")]
    if rollout.reward is not None and len(known) > 1:
        tone = "" if low == high else "up" if rollout.reward >= high else "down" if rollout.reward <= low else ""
        said.append(
            f"as all {len(known)} rollouts of its group"
            if low == high == rollout.reward
            else f"its group has {number(low)} to {number(high)}"
        )
    return Fact("reward", number(rollout.reward), "; ".join(filter(None, said)), tone)


def _ending_fact(view: RolloutView) -> Fact:
    """Return how the rollout ended, whether an answer of it was cut off, and how many of its tool runs failed."""
    text, tone = ending_of(view.rollout)
    cut_off = [str(each.number) for each in view.calls if each.transition.finish_reason == "length"]
    with_id = {event.name for event in view.ended.tool_events if not event.call_id}
    runs = [each for each in view.ended.tool_events if not each.call_id or each.name not in with_id]
    failed = [event.name for event in runs if event.status in ("error", "blocked")]
    if cut_off and not tone:
        calls = f"{'call' if len(cut_off) == 1 else 'calls'} {', '.join(cut_off[:3])}{' …' if len(cut_off) > 3 else ''}"
        tools = f"; {len(failed)} of {len(runs)} tool runs failed" if failed else ""
        return Fact(
            "how it ended", "answer cut off at the limit of tokens", f"{calls}{tools}; {text} of the agent", "warn"
        )
    if not failed or tone:
        return Fact("how it ended", text, f"{len(failed)} of {len(runs)} tool runs failed" if failed else "", tone)
    value = "a tool run failed" if len(failed) == 1 else f"{len(failed)} tool runs failed"
    return Fact("how it ended", value, f"{', '.join(dict.fromkeys(failed))}; {text} of the agent", "warn")


def _sibling(found: Located, view: RolloutView) -> str:
    ids = [each.id for each in view.siblings]
    place = ids.index(view.rollout.id) if view.rollout.id in ids else -1
    return to("rollout", found.key, ids[(place + 1) % len(ids)])


def _words(view: RolloutView) -> list[Block]:
    notices = []
    if view.rollout.error and view.rollout.attempt == view.attempts:
        why = str(reason(view.rollout.error))
        said = why if is_void(view.rollout) else f"it failed: {why}"
        notices.append(Notice(said, "bad", view.rollout.error[:LONGEST_ERROR]))
    if view.empty:
        notices.append(Notice(f"there are no messages: {view.empty}", "muted"))
    if view.texts:
        notices.append(Notice(f"some messages are not as they were sent: {view.texts}", "muted"))
    if view.proof.proved is False:
        notices.append(Notice(f"advantages are not proved: {view.proof.why}", "bad"))
    return [Notices(notices)] if notices else []


def _timeline(address: Address, view: RolloutView) -> Timeline:
    spans = [
        Span(
            lane,
            each.kind,
            each.name,
            each.begin,
            each.end,
            TONES.get(each.status, ""),
            " ".join(filter(None, [each.status if each.kind == "tool" else "", each.detail])),
            _call(address, each.call) if each.call else "",
            selected=each.kind == "call" and each.call == view.chosen,
        )
        for lane, each in view.lanes.moments
    ]
    note = "A tool run is drawn from the answer that asked for it to its own end. When it really began is not recorded."
    return Timeline(view.lanes.lanes, spans, view.lanes.seconds, title="What ran when", note=note)


def _rewards(view: RolloutView, trials: Sequence[Trial]) -> Table:
    rollout, rows = view.rollout, []
    numbers = {call.transition.id: call.number for call in reversed(view.calls)}
    if rollout.attempt == view.attempts:
        for name, value in rollout.rewards.items():
            if name != "reward":
                rows.append([Cell(name), Cell(number(value)), Cell("part"), Cell("returned by the agent")])
        if rollout.reward is not None:
            total = "returned by the agent, with its parts" if rollout.rewards else "returned by the agent"
            rows.append([Cell("reward"), Cell(number(rollout.reward)), Cell("outcome"), Cell(total)])
    for given in view.ended.step_rewards:
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
        more = credit.total - credit.reward - sum(each.value for each in view.ended.step_rewards)
        if abs(more) > 1e-9:
            rows.append(
                [Cell("rules"), Cell(number(more)), Cell("the algorithm's"), Cell("tool_reward and overlong_penalty")]
            )
        rows.append(
            [
                Cell("return"),
                Cell(number(credit.total)),
                Cell("all of it"),
                Cell("the sum by which rollouts are compared"),
            ]
        )
    rows += [
        [Cell(trial.name), Cell(number(trial.graded[rollout.id])), Cell("tried"), Cell(f"{trial.grader} (reward try)")]
        for trial in trials
        if rollout.id in trial.graded
    ]
    empty = "it has no reward: " + (f"fault of {rollout.fault}" if rollout.fault else "it has not ended")
    columns = [Column("name"), Column("value", "number"), Column("kind"), Column("from")]
    note = f"the agent and its grader: {view.agent}" if view.agent else ""
    return Table(columns, rows, title="Where the reward comes from", note=note, empty=empty)


def _calls(address: Address, view: RolloutView) -> list[Block]:
    if not view.calls and view.beginning is None:
        return []
    branches = by_key(view.branches, lambda line: line.at)
    several = any(call.policy != POLICY for call in _stored(view))
    rows = [
        [
            Cell(str(each.number), _call(address, each.number)),
            Cell(each.transition.caller.name, tone=_grey(each.transition)),
            *([Cell(versions_of([each.transition]) or NONE)] if several else ()),
            _status(each),
            Cell(each.transition.finish_reason),
            Cell(count(len(each.transition.prompt_ids)), tone=_grey(each.transition)),
            Cell(count(len(each.transition.response_ids)), tone=_grey(each.transition)),
            _advantage(each),
            *(branch_cells(branches.get(each.number, ())) if branches else ()),
        ]
        for each in view.calls[max(0, view.chosen - 100) : view.chosen + 100]
    ]
    columns = [
        Column("call", "number"),
        Column("agent"),
        *([Column("policy", hint="the policy that answered, with its version")] if several else ()),
        Column("status"),
        Column("ended by"),
        Column("prompt tokens", "number"),
        Column("answer tokens", "number"),
        Column("advantage", "number"),
        *(BRANCH_COLUMNS if branches else ()),
    ]
    note = f"{len(view.calls)} calls, those around the chosen one are shown" if len(rows) < len(view.calls) else ""
    rows = [*inherited_rows(view, len(columns), several=several), *rows]
    keys = [row[0].text for row in rows]
    selected = [str(view.chosen)] if view.chosen else []
    return [Table(columns, rows, keys=keys, selected=selected, title="Calls", note=note)]


def _grey(call: Transition) -> Tone:
    """Return the tone of a call's cells: grey for a call that is marked as untrained."""
    return "muted" if call.untrained else ""


def _status(line: CallLine) -> Cell:
    """Return how a call ended, for a call that is marked as untrained why, and how it stands to other calls."""
    call = line.transition
    text = f"{call.status}, not trained: {call.untrained}" if call.untrained else str(call.status)
    notes = line.notes.said(call.untrained)
    return Cell(f"{text}; {notes}" if notes else text, tone=TONES.get(str(call.status), _grey(call)))


def _stored(view: RolloutView) -> Iterator[Transition]:
    """Yield the calls of a rollout, and of a branch also those that it began with."""
    yield from (call for _, call in (() if view.beginning is None else view.beginning.calls))
    yield from (call.transition for call in view.calls)


def _advantage(call: CallLine) -> Cell:
    known = call.credit.advantage if call.credit else None
    return Cell(number(known), tone=tone_of(known), hint=call.untrained)


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
        Measure("version", tokens.versions, hint=explained("policy version")),
        Measure("trained", tokens.trained),
        Measure("entropy", nothing, unit="nats", missing=NO_ENTROPY),
        Measure("sampler/trainer ratio", nothing, "diverging", missing=NO_RATIO),
    ]


def _why(view: RolloutView, line: CallLine) -> list[Reason]:
    """Return the derivation from the reward to the push of each token of the call's answer."""
    proof = view.proof
    member = proof.members.get(view.rollout.id)
    if line.credit is None or member is None or proof.record is None:
        return [Reason("pushed", "no", line.untrained, None)]
    algorithm, step, proved = proof.algorithm, proof.record.step, proof.proved
    mean, deviation, size = proof.groups.get(view.rollout.group, (member.total, 0.0, 1))
    credit = getattr(algorithm, "credit", "")
    named = credit if isinstance(credit, str) else name_of(credit)
    reasons = [Reason("reward", number(member.reward, 4), "stored; in the rollout's digest", member.recorded)]
    if abs(member.total - member.reward) > 1e-9:
        reasons.append(
            Reason("return", number(member.total, 4), "with what its calls and tools earned", member.recorded)
        )
    if line.credit.own:
        reasons.append(Reason("this call's own", number(line.credit.own, 4), "its step rewards", member.recorded))
    compared = f"mean {number(mean, 4)}, deviation {number(deviation, 4)} of {size} returns"
    how = f"{getattr(algorithm, 'low_level', algorithm.name if algorithm else '')}, credit {named}"
    each = "the mean of its tokens' advantages" if line.credit.advantages else how
    normalised = str(getattr(algorithm, "normalization", "the algorithm's"))
    return [
        *reasons,
        Reason("group", compared, "the returns that it is compared with", proved),
        Reason("advantage", f"{line.credit.advantage:+.5g}", each, proved),
        Reason("weight", f"{line.credit.weight:.4g}", f"share of each token in step {step}: {normalised}", proved),
        Reason("push", f"{line.credit.push:+.4g}", "advantage × weight, on each token's logprob", proved),
        *_clip(proof),
    ]


def _clip(proof: StepProof) -> Sequence[Reason]:
    """Return what may have held a token back: clip and mask. Their shares are known for the whole step only, because the
    trainer's logprobs are not stored."""
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
            line.made,
        )
        for line in view.lines
    ]
    messages += _judge(view)
    if view.rollout.reward is not None and view.rollout.attempt == view.attempts:
        parts = "".join(
            f"\n{name}: {number(value)}" for name, value in view.rollout.rewards.items() if name != "reward"
        )
        messages.append(Message("reward", f"{number(view.rollout.reward)}{parts}", "of the whole rollout"))
    note = f"{count(view.lines_left_out)} later messages are not shown" if view.lines_left_out else ""
    return [Messages(messages, title="What was said", note=note)]


def _judge(view: RolloutView) -> list[Message]:
    """Return what the judge said: the score, and the text about the group, in which the rollout has a number."""
    judged = view.judged
    if judged.missing:
        return [Message("judge", judged.missing, judged.model, tone="warn")]
    return [
        Message(
            "judge",
            each.text or "only the score was kept",
            f"{judged.model}: score {number(each.score, 2)} of 1, with weight {judged.weight:g}; in this text the rollout is "
            f"number {each.number} of {each.count}",
        )
        for each in judged.opinions
    ]


def _commands(found: Located, view: RolloutView) -> list[Block]:
    if not view.calls:
        return []
    command = f"lightning replay {shlex.quote(view.rollout.id)} {named(view.agent)} --runs {place_of(found)}"
    if view.rollout.attempt != view.attempts:
        command += f" --attempt {view.rollout.attempt}"
    # tools of @lightning.tool are answered from the record; their runs belong to no call of the model
    again, detail = _consent(event.name for event in view.ended.tool_events if not event.kind and event.call_id)
    commands = [command + again]
    if view.chosen:
        commands.append(f"{command} --until {view.before}{again}")
    text = "Run the agent again from the record, without a model, or up to the chosen call."
    return [Notices([Notice(text, detail=detail, commands=commands)], title="Replay this rollout")]


def _consent(tools: Iterable[str]) -> tuple[str, str]:
    """Return the option that lets these tools run again, and a sentence that names them; both are empty without tools."""
    names = sorted(set(tools))
    if not names:
        return "", ""
    return " --yes", f"These tools run again: {', '.join(names)}. Leave --yes out if that may do harm."


SAMPLES: Final = 8
"""Branches that the shown command or the button makes at a call."""
ROWS: Final = 200
INHERITED: Final = 100
"""Most calls of its parent that are shown with a branch: the last ones."""
OTHERWISE: Final = (
    "The command makes a run of its own, with a vLLM that has the weights of this call. Add --edit TEXT, --prompt NAME=FILE, "
    "--set temperature=1 or --weights RUN@STEP to change something."
)
FORK: Final = "fork"
"""The action that makes branches beside the training. Only the console on a person's own machine has it."""


def origin_facts(view: RolloutView) -> list[Fact]:
    """Return the facts about a branch's parent and its change; none for a rollout that is no branch."""
    beginning = view.beginning
    if beginning is None:
        return []
    at = f"at call {beginning.at}" if beginning.at else "at a call that is not stored"
    there = ""
    if beginning.key:
        options = {"attempt": beginning.attempt} | ({"call": beginning.at} if beginning.at else {})
        there = to("rollout", beginning.key, beginning.parent, **options)
    facts = [Fact("branch of", beginning.parent, at, to=there)]
    if beginning.branch.changed:
        facts.append(Fact("changed", beginning.branch.changed, "the difference to its parent"))
    return facts


def inherited_rows(view: RolloutView, width: int, *, several: bool = False) -> list[list[Cell]]:
    """Return the rows, in a branch's table of calls, for the calls that were answered from its parent's record. With `several`
    policies the table has a column of them."""
    beginning = view.beginning
    if beginning is None:
        return []
    rows = []
    for place, call in beginning.calls[-INHERITED:]:
        there = to("rollout", beginning.key, beginning.parent, attempt=beginning.attempt, call=place)
        cells = [
            Cell(
                f"parent's {place}",
                there,
                tone="muted",
                hint="answered from its parent's record; not counted as its own",
            ),
            Cell(call.caller.name, tone="muted"),
            *([Cell(versions_of([call]) or NONE, tone="muted")] if several else ()),
            Cell(f"recorded, not trained: {call.untrained}" if call.untrained else "recorded", tone="muted"),
            Cell(call.finish_reason, tone="muted"),
            Cell(count(len(call.prompt_ids)), tone="muted"),
            Cell(count(len(call.response_ids)), tone="muted"),
        ]
        rows.append([*cells, *(Cell(NONE, tone="muted") for _ in range(width - len(cells)))])
    if beginning.branch.edit is not None:
        there = to("rollout", beginning.key, beginning.parent, attempt=beginning.attempt, call=beginning.at)
        cells = [
            Cell(f"parent's {beginning.at}", there, tone="warn"),
            Cell("edited"),
            *([Cell(NONE, tone="muted")] if several else ()),
            Cell(beginning.branch.edit[:200]),
        ]
        rows.append([*cells, *(Cell(NONE, tone="muted") for _ in range(width - len(cells)))])
    return rows


def branch_cells(lines: Sequence[BranchLine]) -> list[Cell]:
    """Return two cells: how many branches begin at a call, and the value of the state before it (the mean reward of those
    branches that change nothing)."""
    void = sum(is_void(each.branch.rollout) for each in lines)
    return [
        Cell(str(len(lines)) if lines else NONE, hint=f"{void} of them void" if void else ""),
        Cell(number(mean_of([each.branch.rollout.reward for each in lines if is_sample(each.branch)]))),
    ]


BRANCH_COLUMNS: Final = (
    Column("branches", "number", "rollouts that begin as this one did and are sampled from this call on"),
    Column("value", "number", "mean reward of the branches in which nothing was changed"),
)
"""The columns about branches in the table of calls, in the order of the cells of `branch_cells`."""


def branches_table(view: RolloutView, here: Mapping[int, str]) -> list[Table]:
    """Return the table of a rollout's branches. `here` has the address of each of its calls, by number."""
    if not view.branches:
        return []
    rows = []
    for line in view.branches[:ROWS]:
        rollout = line.branch.rollout
        ending, tone = ending_of(rollout)
        rows.append(
            [
                Cell(str(line.at), here.get(line.at, "")),
                Cell(rollout.id, to("rollout", line.branch.key, rollout.id)),
                Cell(line.branch.changed or NONE),
                Cell(ending, tone=tone),
                Cell(number(rollout.reward)),
                Cell(rollout.error[:200], tone=tone),
            ]
        )
    columns = [
        Column("at call", "number"),
        Column("branch"),
        Column("changed"),
        Column("how it ended"),
        Column("reward", "number"),
        Column("why"),
    ]
    left = len(view.branches) - len(rows)
    return [Table(columns, rows, title="Branches", note=f"{left} more are not shown" if left else "")]


def branch_it(found: Located, view: RolloutView) -> list[Block]:
    """Return the command (and, while its trainer serves, the button) that makes branches at the chosen call, or why none can
    begin there."""
    if not view.chosen:
        return []
    if view.fork.why:
        said = Notice(f"no branch can begin at call {view.chosen}: {view.fork.why}", "muted")
        return [Notices([said], title="Branch it")]
    rollout, agent = shlex.quote(view.rollout.id), named(view.agent)
    command = f"lightning branch {rollout} {agent} --at {view.fork.at} -n {SAMPLES} --runs {place_of(found)}"
    if view.rollout.attempt != view.attempts:
        command += f" --attempt {view.rollout.attempt}"
    again, detail = _consent(event.name for event in view.ended.tool_events if not event.kind)
    text = f"Make {SAMPLES} rollouts that begin as this one did and are sampled anew from call {view.chosen} on."
    said = Notice(text, detail=" ".join(filter(None, [OTHERWISE, detail])), commands=[command + again])
    return [Notices([said], title="Branch it"), *([_fork_here(found, view)] if view.fork.live else [])]


def named(agent: str) -> str:
    """Return an agent's name quoted for a command, or `MODULE:AGENT` if it is not known."""
    return shlex.quote(agent) if agent else "MODULE:AGENT"


def _fork_here(found: Located, view: RolloutView) -> Actions:
    """Return the button that makes branches with the vLLM of the run's trainer, at the chosen call."""
    fork = view.fork
    arguments: dict[str, Json] = {
        "run": found.key, "rollout": view.rollout.id, "attempt": view.rollout.attempt, "at": fork.at,
    }  # fmt: skip
    if view.agent:
        arguments["agent"] = view.agent
    again = f" These tools run again in each: {', '.join(fork.tools)}." if fork.tools else ""
    ask = f"Run {view.agent or 'the agent'} {SAMPLES} times on this machine, beside the training?{again}"
    fields = () if view.agent else (("agent", "Agent as MODULE:FUNCTION"),)
    note = "The run's own vLLM answers, in the version that answered this call; an update by the trainer makes branches void."
    return Actions([Action(FORK, f"Fork here: {SAMPLES} branches", arguments, ask, fields)], note=note)
