"""Nouns to database values and back: plain columns for what is searched, JSON text (`json_text`) for what is nested.

The invariant: a noun read back equals the noun written.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from lightning.errors import DataError, StoreError
from lightning.store.json_text import (
    as_list,
    as_mapping,
    caller_from_text,
    conversation_from_text,
    dump,
    finite,
    load,
    plain_text,
    versions_from_text,
)
from lightning.types import (
    CallStatus,
    Fault,
    LogProbs,
    Resource,
    ResourceKind,
    Rollout,
    Run,
    Scope,
    Span,
    Status,
    StepRecord,
    Task,
    Token,
    TokenIds,
    Transition,
)

Row: TypeAlias = tuple[Any, ...]
"""What a database gives back: its columns are in the order of the `sql` constant that was asked."""
Value: TypeAlias = int | float | str | bytes | None
"""What a database takes."""


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
        tool_calls=tuple(as_list(tool_calls, "the tool calls of a transition")),
        conversation=conversation_from_text(conversation),
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
        attributes=as_mapping(attributes, f"the attributes of span {span_id!r} of rollout {rollout!r}"),
    )


def run_from_row(row: Row) -> Run:
    """From `sql.RUN_COLUMNS`."""
    run, name, config, created_at, project = row
    return Run(run, name, as_mapping(config, f"the configuration of run {run!r}"), created_at, project)


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
    return dict(as_mapping(text, f"the resources of {what}"))


def rollout_from_row(row: Row) -> Rollout:
    """From `sql.ROLLOUT_COLUMNS`."""
    (rollout, run, task, group, step, split, index, max_attempts, status, attempt, reward, rewards) = row[:12]
    fault, error, seconds, trained_at_step, resources = row[12:17]
    task_id, task_input, expected, metadata = as_list(task, f"the task of rollout {rollout!r}")
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
        rewards=as_mapping(rewards, f"the rewards of rollout {rollout!r}"),
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
        dump(dict(record.context), f"the context of step {record.step}"),
    )


def step_from_row(row: Row) -> StepRecord:
    """From `sql.STEP_COLUMNS`."""
    run, step, policy_version, rollouts, digests, digest, checkpoint, metrics, groups, context, at = row
    what = f"step {step} of run {run!r}"
    return StepRecord(
        run=run,
        step=step,
        policy_version=policy_version,
        rollouts=tuple((rollout, attempt) for rollout, attempt in as_list(rollouts, what)),
        digests=tuple(as_list(digests, what)),
        digest=digest,
        checkpoint=checkpoint,
        metrics=as_mapping(metrics, what),
        at=at,
        groups=tuple(as_list(groups, f"the groups of {what}")),
        context=as_mapping(context, f"the context of {what}"),
    )


def resource_from_row(row: Row) -> Resource:
    """From `sql.RESOURCE_COLUMNS`. Raises `StoreError` for content that is not what its digest says."""
    name, kind, content, metadata, version, created_at, digest = row
    what = f"version {version} of resource {name!r}"
    resource = Resource(
        name=name,
        content=load(content, what),
        kind=ResourceKind(kind),
        metadata=as_mapping(metadata, f"the metadata of {what}"),
        version=version,
        created_at=created_at,
    )
    if resource.digest != digest:
        raise StoreError(
            f"{what} is corrupt in the database: its content has changed. Restore the database from a backup"
        )
    return resource
