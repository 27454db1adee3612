"""Nouns to database values and back: JSON text for what is nested, plain columns for what is searched.

The invariant: a noun read back equals the noun written (tuples of JSON become lists), and text survives whatever an agent put
into it, because nested text is escaped to ASCII.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from lightning.errors import DataError, StoreError
from lightning.types import (
    Caller,
    CallStatus,
    Conversation,
    Fault,
    Json,
    LogProbs,
    Resource,
    ResourceKind,
    Rollout,
    Run,
    Scope,
    Span,
    Status,
    StepRecord,
    StepReward,
    Task,
    Token,
    TokenIds,
    ToolEvent,
    Transition,
    VersionRun,
)

Row: TypeAlias = tuple[Any, ...]
"""What a database gives back: its columns are in the order of the `sql` constant that was asked."""
Value: TypeAlias = int | float | str | bytes | None
"""What a database takes."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump(value: Json, what: str = "a value") -> str:
    """Compact ASCII JSON. Raises `DataError` naming `what` when the value is not JSON."""
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error}): use only None, bool, numbers, text, lists and dicts") from error


def load(text: str, what: str = "a value") -> Json:
    """Parse what `dump` wrote. Raises `StoreError` naming `what` when the stored text was damaged."""
    try:
        value: Json = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} is corrupt in the database: {error}. Restore the database from a backup") from error
    return value


def plain_text(text: str) -> str:
    """Text that any database takes: lone surrogates and NUL, which agents' error messages may hold, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def finite(value: float, what: str) -> float:
    """`value` as a float. Raises `DataError` when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{what} is {value!r}: it must be a finite number")
    return float(value)


# callers, tool events, step rewards, labels, transitions ------------------------------------------------------------


def caller_to_json(caller: Caller) -> Json:
    """`[agent, path, span, parent, framework]` without the empty tail: most calls have only an agent."""
    parts: list[Json] = [caller.agent, list(caller.path), caller.span_id, caller.parent_id, caller.framework]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts


def caller_from_text(text: str) -> Caller:
    """The caller of a transition, from the text of `caller_to_json`."""
    return _caller_from_json(_rows(text, "the caller of a transition"))


def _caller_from_json(parts: Sequence[Any]) -> Caller:
    agent, *rest = parts
    path, *names = rest or [()]
    return Caller(agent, tuple(path), *names)


def tool_events_to_text(events: Sequence[ToolEvent]) -> str:
    """All tool events of an attempt. One without a response id reads as it did before events had any."""
    rows: list[Json] = [
        [
            event.name,
            event.status,
            event.call_id,
            event.arguments,
            event.output,
            event.error,
            None if event.caller is None else caller_to_json(event.caller),
            event.at,
            *([event.response_id] if event.response_id else []),
        ]
        for event in events
    ]
    return dump(rows, "a tool event")


def tool_events_from_text(text: str) -> list[ToolEvent]:
    """What `tool_events_to_text` wrote."""
    return [
        ToolEvent(
            name,
            status,
            call_id,
            arguments,
            output,
            error,
            None if caller is None else _caller_from_json(caller),
            at,
            response[0] if response else "",
        )
        for name, status, call_id, arguments, output, error, caller, at, *response in _rows(
            text, "the tool events of an attempt"
        )
    ]


def step_rewards_to_text(rewards: Sequence[StepReward]) -> str:
    """All step rewards of an attempt. Raises `DataError` for a NaN or infinite value."""
    return dump(
        [[finite(r.value, f"step reward {r.name!r}"), r.name, r.response_id, r.at] for r in rewards], "a step reward"
    )


def step_rewards_from_text(text: str) -> list[StepReward]:
    """What `step_rewards_to_text` wrote."""
    return [StepReward(*row) for row in _rows(text, "the step rewards of an attempt")]


def labels_to_text(labels: Mapping[str, Caller]) -> str:
    """All labels of an attempt, in the order of their response ids: who said them in which order does not matter."""
    return dump({response: caller_to_json(labels[response]) for response in sorted(labels)}, "a label")


def labels_from_text(text: str) -> dict[str, Caller]:
    """What `labels_to_text` wrote."""
    found = _mapping(text, "the labels of an attempt")
    return {response: _caller_from_json(parts) for response, parts in found.items()}


@lru_cache(maxsize=256)
def versions_to_text(versions: tuple[VersionRun, ...]) -> str:
    """Which policy version sampled from which response token on."""
    return dump([[v.start, v.version] for v in versions], "a policy version")


@lru_cache(maxsize=256)
def versions_from_text(text: str) -> tuple[VersionRun, ...]:
    """What `versions_to_text` wrote."""
    return tuple(VersionRun(*row) for row in _rows(text, "the policy versions of a transition"))


def conversation_to_text(conversation: Conversation | None) -> str:
    """What a response adds to its conversation; empty for None, so that calls of other APIs take no place."""
    if conversation is None:
        return ""
    return dump([conversation.after, conversation.kept, *conversation.messages], "a conversation")


def _conversation_from_text(text: str) -> Conversation | None:
    if not text:
        return None
    after, kept, *messages = _rows(text, "the conversation of a transition")
    return Conversation(tuple(messages), after, kept)


def transition_from_row(
    rollout: str, attempt: int, row: Row, prompt_ids: TokenIds, response_ids: TokenIds, logprobs: LogProbs
) -> Transition:
    """From `sql.CALL_COLUMNS` and the tokens. Raises `StoreError`, `ValueError` or `TypeError` for a damaged row."""
    seq, response, caller, versions, status, finish_reason, choice, temperature, constrained, *rest = row
    started_at, ended_at, tool_calls, conversation = rest
    return Transition(
        rollout=rollout,
        attempt=attempt,
        seq=seq,
        id=response,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=logprobs,
        caller=caller_from_text(caller),
        versions=versions_from_text(versions),
        status=CallStatus(status),
        finish_reason=finish_reason,
        choice=choice,
        temperature=temperature,
        constrained=bool(constrained),
        started_at=started_at,
        ended_at=ended_at,
        tool_calls=tuple(_rows(tool_calls, "the tool calls of a transition")),
        conversation=_conversation_from_text(conversation),
    )


def span_values(span: Span) -> tuple[Value, ...]:
    """In the order of `sql.SPAN_COLUMNS`. Raises `DataError` when a time is no number or an attribute no JSON."""
    what = f"of span {span.span_id!r} of rollout {span.rollout!r}"
    return (
        span.span_id,
        span.trace_id,
        span.parent_id,
        plain_text(span.name),
        span.kind,
        finite(span.started_at, f"started_at {what}"),
        finite(span.ended_at, f"ended_at {what}"),
        span.status,
        plain_text(span.error),
        plain_text(span.service),
        dump(dict(span.attributes), f"an attribute {what}"),
    )


def span_from_row(rollout: str, attempt: int, row: Row) -> Span:
    """From `sql.SPAN_COLUMNS`."""
    span_id, trace_id, parent_id, name, kind, started_at, ended_at, status, error, service, attributes = row
    return Span(
        rollout=rollout,
        attempt=attempt,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        kind=kind,
        started_at=started_at,
        ended_at=ended_at,
        status=status,
        error=error,
        service=service,
        attributes=_mapping(attributes, f"the attributes of span {span_id!r} of rollout {rollout!r}"),
    )


# runs, rollouts, steps ------------------------------------------------------------------------------------------


def run_from_row(row: Row) -> Run:
    """From `sql.RUN_COLUMNS`."""
    run, name, config, created_at, project = row
    return Run(run, name, _mapping(config, f"the configuration of run {run!r}"), created_at, project)


def token_values(token: Token) -> tuple[Value, ...]:
    """In the order of `sql.TOKEN_COLUMNS`, but for the times."""
    return token.id, token.scope.value, token.digest, token.project, plain_text(token.name)


def token_from_row(row: Row) -> Token:
    """From `sql.TOKEN_COLUMNS`."""
    token, scope, *rest = row
    return Token(token, Scope(scope), *rest)


def task_to_text(task: Task) -> str:
    """A task with its id."""
    return dump([task.id, task.input, task.expected, dict(task.metadata)], f"task {task.id!r}")


def rollout_values(rollout: Rollout) -> tuple[Value, ...]:
    """In the order of `sql.INSERT_ROLLOUT`. Raises `DataError` unless the rollout is new: pending, no attempt, no reward."""
    if rollout.status is not Status.PENDING or rollout.attempt != 0 or rollout.reward is not None:
        raise DataError(
            f"rollout {rollout.id!r} is created as {rollout.status.value} with attempt {rollout.attempt}: "
            "create rollouts pending, then lease and complete them"
        )
    if rollout.max_attempts < 1:
        raise DataError(f"rollout {rollout.id!r} has max_attempts={rollout.max_attempts}: it must be at least 1")
    return (
        rollout.id,
        rollout.run,
        task_to_text(rollout.task),
        rollout.group,
        rollout.step,
        rollout.split,
        rollout.index,
        rollout.max_attempts,
        versions_of_resources(rollout),
    )


def versions_of_resources(rollout: Rollout) -> str:
    """The resources of a rollout, equal text for equal versions. Raises `DataError` for what is no version."""
    for name, version in rollout.resources.items():
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise DataError(
                f"rollout {rollout.id!r} names version {version!r} of resource {name!r}: versions are 1, 2, ..."
            )
    return dump({name: rollout.resources[name] for name in sorted(rollout.resources)})


def versions_from_resources(text: str, what: str) -> dict[str, int]:
    """What `versions_of_resources` wrote."""
    return dict(_mapping(text, f"the resources of {what}"))


def rollout_from_row(row: Row) -> Rollout:
    """From `sql.ROLLOUT_COLUMNS`."""
    (rollout, run, task, group, step, split, index, max_attempts, status, attempt, reward, rewards) = row[:12]
    fault, error, seconds, trained_at_step, resources = row[12:17]
    task_id, task_input, expected, metadata = _rows(task, f"the task of rollout {rollout!r}")
    return Rollout(
        id=rollout,
        run=run,
        task=Task(task_input, expected, metadata, task_id),
        group=group,
        step=step,
        split=split,
        index=index,
        max_attempts=max_attempts,
        status=Status(status),
        attempt=attempt,
        reward=reward,
        rewards=_mapping(rewards, f"the rewards of rollout {rollout!r}"),
        fault=Fault(fault) if fault else None,
        error=error,
        seconds=seconds,
        trained_at_step=trained_at_step,
        resources=versions_from_resources(resources, f"rollout {rollout!r}"),
    )


def step_values(record: StepRecord) -> tuple[Value, ...]:
    """In the order of `sql.INSERT_STEP`, but for the time."""
    return (
        record.run,
        record.step,
        record.policy_version,
        dump([[rollout, attempt] for rollout, attempt in record.rollouts]),
        dump(list(record.digests)),
        record.digest,
        record.checkpoint,
        dump(dict(record.metrics), f"the metrics of step {record.step}"),
        dump(list(record.groups)),
    )


def step_from_row(row: Row) -> StepRecord:
    """From `sql.STEP_COLUMNS`."""
    run, step, policy_version, rollouts, digests, digest, checkpoint, metrics, groups, at = row
    what = f"step {step} of run {run!r}"
    return StepRecord(
        run=run,
        step=step,
        policy_version=policy_version,
        rollouts=tuple((rollout, attempt) for rollout, attempt in _rows(rollouts, what)),
        digests=tuple(_rows(digests, what)),
        digest=digest,
        checkpoint=checkpoint,
        metrics=_mapping(metrics, what),
        at=at,
        groups=tuple(_rows(groups, f"the groups of {what}")),
    )


def resource_from_row(row: Row) -> Resource:
    """From `sql.RESOURCE_COLUMNS`. Raises `StoreError` for content that is not what its digest says."""
    name, kind, content, metadata, version, created_at, digest = row
    what = f"version {version} of resource {name!r}"
    resource = Resource(
        name=name,
        content=load(content, what),
        kind=ResourceKind(kind),
        metadata=_mapping(metadata, f"the metadata of {what}"),
        version=version,
        created_at=created_at,
    )
    if resource.digest != digest:
        raise StoreError(
            f"{what} is corrupt in the database: its content has changed. Restore the database from a backup"
        )
    return resource


def _rows(text: str, what: str) -> list[Any]:
    value = load(text, what)
    if not isinstance(value, list):
        raise StoreError(f"{what} is corrupt in the database: expected a list. Restore the database from a backup")
    return value


def _mapping(text: str, what: str) -> Mapping[str, Any]:
    value = load(text, what)
    if not isinstance(value, dict):
        raise StoreError(f"{what} is corrupt in the database: expected an object. Restore the database from a backup")
    return value
