"""A run with tools whose failures are known: `divide` fails where `by` is 0, and `look` never fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.store.protocol import Store
from lightning.trainer.context import mark_over
from lightning.types import (
    Caller,
    Fault,
    Outcome,
    Rollout,
    Run,
    Task,
    ToolEvent,
    Transition,
    logprobs,
    token_ids,
)
from lightning_record import exchanges
from lightning_record.exchanges import TEXTS, Flag

MARKUP = "<img src=x onerror=alert(1)>"
OFFERED = [
    {
        "type": "function",
        "function": {
            "name": "divide",
            "parameters": {"type": "object", "properties": {"a": {}, "by": {}}, "additionalProperties": False},
        },
    }
]


def asked(name: str, arguments: object, called: str) -> dict[str, Any]:
    """A tool call of an answer, as the chat API has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": called, "type": "function", "function": {"name": name, "arguments": text}}


def call(
    rollout: Rollout,
    seq: int,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    *,
    agent: str = "solver",
    tools: object = None,
    flags: Flag = exchanges.WHOLE,
) -> Transition:
    """A call with its recorded texts."""
    request = {"messages": list(messages), **({"tools": tools} if tools else {})}
    reply = {"choices": [{"index": 0, "message": {"role": "assistant", **answer}}]}
    packed = exchanges.pack(
        "/chat/completions", 200, exchanges.canonical(request), exchanges.canonical(reply), flags=flags
    )
    return Transition(
        rollout.id,
        rollout.attempt,
        seq,
        f"{rollout.id}-{seq}",
        token_ids([1]),
        token_ids([2]),
        logprobs([-0.5]),
        caller=Caller(agent, (agent,)),
        finish_reason=str(answer.get("finish_reason", "stop")),
        tool_calls=tuple(each["id"] for each in answer.get("tool_calls") or ()),
        extras={TEXTS: packed},
    )


async def write(
    store: Store, run: str = "run", *, groups: int = 8, size: int = 4, over: bool = True, flags: Flag = exchanges.WHOLE
) -> None:
    """`groups` tasks over two steps, each with `size` rollouts; in the first half of a group `divide` is called with 0."""
    await store.put_run(Run(run, run, {"model": "m"}))
    rollouts = [
        Rollout(f"{run}/{group % 2 + 1}/{group}/{index}", run, Task(f"task {group} {MARKUP}"), f"{run}/{group % 2 + 1}/{group}",
                step=group % 2 + 1, index=index)
        for group in range(groups)
        for index in range(size)
    ]  # fmt: skip
    await store.create_rollouts(rollouts)
    for lease in await store.lease(run, "worker", limit=len(rollouts)):
        made = lease.rollout
        bad = made.index < size // 2
        arguments = {"a": made.index, "by": 0 if bad else 1 + made.index}
        first = asked("divide", arguments, f"{made.id}-id")
        question = {"role": "user", "content": f"Divide, please {made.group}"}
        calls = [call(made, 0, [question], {"content": None, "tool_calls": [first]}, tools=OFFERED, flags=flags)]
        result = {"role": "tool", "tool_call_id": f"{made.id}-id", "content": f"result {made.index}"}
        more = [question, {"role": "assistant", "content": None, "tool_calls": [first]}, result]
        calls.append(call(made, 1, more, {"content": f"Die Straße ist {made.index} km lang"}, flags=flags))
        await store.append(calls)
        ended = ToolEvent(
            "divide",
            "error" if bad else "ok",
            call_id=f"{made.id}-id",
            arguments=arguments,
            output="" if bad else f"result {made.index}",
            error=f"ZeroDivisionError: division by zero {MARKUP}" if bad else "",
            response_id=calls[0].id,
        )
        looked = ToolEvent("look", "ok", arguments={"where": "door"}, output="a wall", response_id=calls[1].id)
        await store.complete(made.id, lease.attempt, Outcome(reward=0.25 if bad else 1.0, tool_events=(ended, looked)))
    await mark_over(store, run, over)


async def one(
    store: Store,
    run: str,
    calls: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any], object]],
    events: Sequence[ToolEvent] = (),
    *,
    ended: bool = True,
    error: str = "",
    fault: Fault = Fault.AGENT,
) -> None:
    """A run of one rollout with these calls: messages, answer and offered tools."""
    await store.put_run(Run(run, run, {"model": "m"}))
    await store.create_rollouts([Rollout(f"{run}/1/0/0", run, Task("one"), f"{run}/1/0", step=1)])
    (lease,) = await store.lease(run, "worker")
    made = [
        call(lease.rollout, seq, messages, answer, tools=tools) for seq, (messages, answer, tools) in enumerate(calls)
    ]
    await store.append(made)
    if ended:
        outcome = Outcome(fault=fault, error=error) if error else Outcome(reward=0.5)
        await store.complete(
            lease.rollout.id, 1, Outcome(outcome.reward, fault=outcome.fault, error=error, tool_events=tuple(events))
        )
    await mark_over(store, run, ended)
