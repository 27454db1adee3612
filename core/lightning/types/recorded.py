"""What an attempt leaves behind: its model calls token by token, who made them, its tool runs, step rewards and spans; and
what these values are made of: JSON, and token arrays.

The invariant: none of it is ever changed in place. Token arrays are `array.array` buffers that numpy and torch can read without
a copy, and whoever holds one treats it as read-only.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from lightning.errors import ConfigError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

UNSERVED = "unserved"
"""The finish reason of a call that failed because no policy server was there, or the one it was sent to went away."""
TOO_LONG = "context_length_exceeded"
"""The finish reason, and OpenAI's code, of a call that the policy server refused: prompt and answer together do not fit."""
EXPIRED = "expired_token"
"""The finish reason of a call that was refused because the agent's API key had expired; one is recorded for each key."""
BRANCH_VOID = "branch_void"
"""The finish reason of a call that was refused because its branch does not begin as its parent did."""
SERVED = "serve"
"""The split of rollouts of a served model."""
CONVERSATION_ID = "served-"
"""What the ids of those begin with that are conversations."""
CALLER_HEADER: Final = "x-lightning-caller"
"""The header of a call that says who is calling: a `Caller` as JSON."""
ROLLOUT_HEADER: Final = "x-lightning-rollout"
"""The header of a call with the rollout's key, where a client has a key of its own."""
GREEDY_BELOW: Final = 1e-5
"""vLLM samples greedily below this temperature, and then reports logprobs at temperature 1."""
POLICY = "policy"
"""The policy's name where there is only one."""
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
TokenIds: TypeAlias = "array[int]"
"""`array('i')`: 32-bit token ids, exactly as the policy server returned them."""
LogProbs: TypeAlias = "array[float]"
"""`array('f')`: 32-bit log-probabilities (nats), one per response token; empty when the engine gave none."""
MAX_DEPTH = 100
"""Lists and mappings inside one another in a task or a resource."""


class CallStatus(StrEnum):
    """How a model call ended: only `OK` calls are ever trained.

    `MEDIA` calls were answered, too, but the prompt had an image, audio, video or a file, of which its token ids say nothing.
    `REFUSED` ones were not sampled, since the gateway or the policy server does not take such a request, or a plugin's stage
    refused them afterwards, with what was sampled. The agent was told so with a status of 400 to 499.
    """

    OK = "ok"
    MEDIA = "media"
    ABORTED = "aborted"
    ERROR = "error"
    REFUSED = "refused"

    @property
    def answered(self) -> bool:
        """Whether the agent has the whole answer."""
        return self in (CallStatus.OK, CallStatus.MEDIA)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling the model: `agent` is the name users put in `train_agents`, `path` runs outermost to innermost."""

    agent: str
    path: tuple[str, ...] = ()
    span_id: str = ""
    parent_id: str = ""
    framework: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.path, str):  # its letters would be names
            as_texts(self.path, "Caller.path")

    @property
    def name(self) -> str:
        """What tells one agent from another: the path, as `train_agents` matches it; the agent's name without one."""
        return "/".join(self.path) or self.agent


UNNAMED: Final = Caller("agent")
"""The caller of a call that no adapter, no header and no alias has named."""


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One tool run as an adapter saw it. `status` is `ok`, `error`, `blocked` or `unknown`; `at` is Unix time in seconds.

    `blocked`: a guardrail or a person refused the run, or kept its output from the model.

    `kind` is `unknown_tool` where nothing ran, since the model called a tool that its request did not offer; the status is then
    `error`, whatever the framework makes of it.

    `call_id` is the id under which the model asked for the run; `response_id` is that of the last call before it, as the code
    that ran it saw it. Whoever emits an event may leave the latter empty: the rollout fills it in.

    `output` is a text of at most 4096 characters. `result` is the whole JSON text of what a `lightning.tool` returned; empty
    where that is a text which `output` has whole, and where nobody told more than the output. `incomplete` says that what the
    tool returned is not kept: it was more than 1 MB, no JSON, or had a credential.
    """

    name: str
    status: str
    call_id: str = ""
    arguments: Json = None
    output: str = ""
    error: str = ""
    caller: Caller | None = None
    at: float = 0.0
    response_id: str = ""
    result: str = ""
    incomplete: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of the agent's MDP in the agent's own words, before its call `response_id` (empty: no call followed).

    `values` is JSON of at most 4 KB: what `lightning.state` was given, or what a graph's node `name` was called with; a text
    stands in the place of what is longer. `at` is Unix time in seconds by the agent's clock.
    """

    values: Json
    name: str = "state"
    response_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReward:
    """A reward given inside a rollout by `lightning.reward`, for the call `response_id`.

    Empty where nobody knew which call came last; then `at`, Unix time in seconds by the agent's clock, has to tell.
    """

    value: float
    name: str = "reward"
    response_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionRun:
    """From response token `start` on, version `version` of the policy with this name sampled."""

    start: int
    version: int
    policy: str = POLICY


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat messages up to the end of a response of the Responses API, as what it adds to an earlier one of its attempt.

    The first `kept` messages are those of the response `after` (empty: there is none), then come `messages`, the answer last.
    """

    messages: tuple[Json, ...]
    after: str = ""
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Transition:
    """One model call as a step of the agent's MDP: state = `prompt_ids`, action = `response_ids`.

    `(rollout, attempt, seq)` is the idempotency key; `seq` counts the calls of an attempt in the order they began.
    With `n > 1` each choice is a transition of its own (same `id`, different `choice`). `versions` starts at token 0
    and has one more entry for each weight update that fell inside the call. `constrained` marks calls sampled under a
    grammar or other logit mask: their logprobs are not comparable with an unmasked forward pass. `tool_calls` are the ids
    under which the response called tools, in order, as the agent was given them: what says which call a tool ran for.
    `error` is what the agent was told of a call that was refused, whose `finish_reason` is the error's code. `max_tokens_asked`
    is the limit of the answer that the agent asked for where there was less room: it got the room that was left (else 0).
    `requested_model` is the model that the agent asked for. `extras` are bytes of plugins by the plugin's name.

    The extra `texts` is what the agent sent and got: `lightning_record.exchanges.read` reads it. There is none where it is not
    recorded (`gateway.record_requests`), and for every choice of a call but its first. `conversation` is what
    `previous_response_id` may go on with: `lightning_record.conversation.conversation_in` reads it. There is none for calls
    through other APIs, those with `store` false, and those whose text may not be stored.
    """

    rollout: str
    attempt: int
    seq: int
    id: str
    prompt_ids: TokenIds
    response_ids: TokenIds
    logprobs: LogProbs
    caller: Caller = UNNAMED
    versions: tuple[VersionRun, ...] = (VersionRun(0, 0),)
    status: CallStatus = CallStatus.OK
    finish_reason: str = ""
    choice: int = 0
    temperature: float = 1.0
    constrained: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    tool_calls: tuple[str, ...] = ()
    error: str = ""
    max_tokens_asked: int = 0
    requested_model: str = ""
    extras: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """The idempotency key."""
        return (self.rollout, self.attempt, self.seq)

    @property
    def version(self) -> int:
        """The version that sampled the first response token."""
        return self.versions[0].version


@dataclass(frozen=True, slots=True)
class Span:
    """One OpenTelemetry span of an attempt, wherever it was made. Unlike transitions, spans are told by the agent's side; only
    those of tools that the model has invented are told by the gateway.

    `(rollout, attempt, span_id)` is the idempotency key. Ids are lower-case hexadecimal (`trace_id` 32 digits, the others 16);
    `parent_id` is empty at the top of a trace. Times are Unix seconds; `kind` is `internal`, `server`, `client`, `producer`
    or `consumer`, `status` is `ok`, `error` or `unset`, and `service` names the program that made the span.
    """

    rollout: str
    attempt: int
    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str = ""
    kind: str = "internal"
    started_at: float = 0.0
    ended_at: float = 0.0
    status: str = "unset"
    error: str = ""
    service: str = ""
    attributes: Mapping[str, Json] = field(default_factory=dict)


def as_texts(given: Iterable[str], what: str) -> tuple[str, ...]:
    """What somebody gave as several texts: each place where a sequence of texts is taken asks here.

    Raises `ConfigError`, naming `what` it is, for one text, whose letters nobody means, and for what is no text.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"{what} is {given!r:.200}, not a list of texts: write {what}=[...]")
    texts = tuple(given)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"{what}[{place}] is {text!r:.200}, not a text: give a list of texts")
    return texts


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items that have the same key together, by key; keys and items in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def token_ids(values: Sequence[int] = ()) -> TokenIds:
    """Pack integers into the project's token array."""
    return array("i", values)


def logprobs(values: Sequence[float] = ()) -> LogProbs:
    """Pack floats into the project's log-probability array."""
    return array("f", values)


def shared_prefix(one: bytes, other: bytes, item: int = 1) -> int:
    """How many items of `item` bytes each both begin with."""
    limit = min(len(one), len(other)) // item
    if one[: limit * item] == other[: limit * item]:
        return limit
    if one[:item] != other[:item]:
        return 0
    low, high = 1, limit  # one[:low] is shared, one[:high] is not: bytes compare far faster than Python counts
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * item : middle * item] == other[low * item : middle * item]:
            low = middle
        else:
            high = middle
    return low


def not_json(value: object, depth: int = 0) -> tuple[str, str] | None:
    """Where inside `value` something is not JSON (as `['key'][0]`) and what it is; None when all of it is JSON."""
    if value is None or isinstance(value, (str, int)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"is {value}, not a finite number")
    if not isinstance(value, (list, tuple, dict)):
        return "", f"is a {type(value).__qualname__}"
    if depth == MAX_DEPTH:
        return "", f"is nested more than {MAX_DEPTH} deep, or contains itself"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and not isinstance(key, str):
            return "", f"has the key {key!r}, which is no string"
        if found := not_json(item, depth + 1):
            return f"[{key!r}]{found[0]}", found[1]
    return None
