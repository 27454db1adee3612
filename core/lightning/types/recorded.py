"""The types of an attempt's record: its model calls token by token, their callers, tool runs, step rewards and spans; and the
types of their fields, JSON and token arrays.

The invariant: no value is ever changed in place. Token arrays are read-only views of memory that numpy and torch read without a
copy. Calls that continue one another are views of the same memory, so they take no more of it than their different tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from lightning.errors import ConfigError, DataError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

UNSERVED = "unserved"
"""The finish reason of a call that failed because there was no policy server, or because the server stopped during the call."""
TOO_LONG = "context_length_exceeded"
"""The finish reason, and OpenAI's error code, of a call that was refused because prompt and answer do not fit the context."""
EXPIRED = "expired_token"
"""The finish reason of a call that was refused because the agent's API key had expired; one such call is recorded per key."""
BRANCH_VOID = "branch_void"
"""The finish reason of a call that was refused because its branch did not repeat its parent's calls exactly."""
SERVED = "serve"
"""The split of rollouts that hold the calls to a served model (`lightning serve`)."""
CONVERSATION_ID = "served-"
"""The prefix of the ids of served rollouts that are conversations."""
CALLER_HEADER: Final = "x-lightning-caller"
"""The request header that names the caller: a `Caller` as JSON."""
UNTRAINED_HEADER: Final = "x-lightning-untrained"
"""The request header that says that its call is not to be trained, and why (`read_reason`)."""
REJECTED_HEADER: Final = "x-lightning-rejected"
"""The request header with the id of an earlier call of the attempt that the agent rejected and, after a space, the reason."""
LONGEST_REASON: Final = 80
"""The most characters of the reason why a call is not trained. Reasons name metrics."""
REJECTED: Final = "rejected"
"""The reason of a call that the agent rejected without saying why."""
ROLLOUT_HEADER: Final = "x-lightning-rollout"
"""The request header with the rollout's key, for clients that send an API key of their own."""
GREEDY_BELOW: Final = 1e-5
"""vLLM samples greedily below this temperature, and then reports logprobs at temperature 1."""
POLICY = "policy"
"""The policy's name if there is only one."""
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
if TYPE_CHECKING:
    TokenIds: TypeAlias = memoryview[int]
    """A view of 32-bit integers (format `i`): token ids, exactly as the policy server returned them."""
    LogProbs: TypeAlias = memoryview[float]
    """A view of 32-bit floats (format `f`): log-probabilities (nats), one per response token; empty if the policy server gave
    none."""
else:  # no Python below 3.14 has `memoryview[int]` when it runs
    TokenIds = LogProbs = memoryview
MAX_DEPTH = 100
"""The largest depth of lists and mappings inside one another in a task or a resource."""


class CallStatus(StrEnum):
    """The end of a model call. Only `OK` calls are ever trained.

    `MEDIA` calls were answered, too, but their prompt had an image, audio, video or a file, which its token ids do not hold.
    `REFUSED` calls got a status of 400 to 499: the gateway or the policy server does not take such a request, so nothing was
    sampled, or a plugin's stage refused the call after sampling.
    """

    OK = "ok"
    MEDIA = "media"
    ABORTED = "aborted"
    ERROR = "error"
    REFUSED = "refused"

    @property
    def answered(self) -> bool:
        """Whether the agent got the whole answer."""
        return self in (CallStatus.OK, CallStatus.MEDIA)


NO_ADAPTER: Final = "no-adapter:"
"""The prefix of `Caller.framework`, before the framework's module, for a call by a framework without an adapter."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The agent that calls the model. `agent` is its name, as in `train_agents`; `path` are the names of agents and components
    around the call, from the outermost to the innermost."""

    agent: str
    path: tuple[str, ...] = ()
    span_id: str = ""
    parent_id: str = ""
    framework: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.path, str):  # each letter would count as a name
            as_texts(self.path, "Caller.path")

    @property
    def name(self) -> str:
        """The agent's full name: the path joined by slashes, as `train_agents` matches it, or `agent` if there is no path."""
        return "/".join(self.path) or self.agent

    @property
    def unadapted(self) -> str:
        """The framework that made the call and has no adapter, as its module; empty for any other call."""
        return self.framework.removeprefix(NO_ADAPTER) if self.framework.startswith(NO_ADAPTER) else ""


UNNAMED: Final = Caller("agent")
"""The caller of a call that no adapter, header or alias names."""


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One tool run as an adapter saw it. `status` is `ok`, `error`, `blocked` or `unknown`; `at` is Unix time in seconds.

    `blocked` means that a guardrail or a person refused the run, or kept its output from the model.

    `kind` is `unknown_tool` if the model called a tool that its request did not offer, so that nothing ran; the status is then
    `error`, whatever the framework reports.

    `call_id` is the id under which the model asked for the run. `response_id` is the id of the last model call before the run,
    as seen by the code that ran the tool; an adapter may leave it empty, and the rollout fills it in.

    `output` is a text of at most 4096 characters. `result` is the whole JSON text of the value that a `lightning.tool`
    returned; it is empty if that is a text which `output` holds whole, or if only the output was reported. `incomplete` says
    that the returned value is not kept: it was larger than 1 MB, not JSON, or had a credential.
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
    """The state of the agent's MDP, as the agent reported it, before its call `response_id` (empty: no call followed).

    `values` is JSON of at most 4 KB: the arguments of `lightning.state`, or the input of a graph's node `name`; a longer state
    is replaced by a shortened text. `at` is Unix time in seconds by the agent's clock.
    """

    values: Json
    name: str = "state"
    response_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReward:
    """A reward given inside a rollout by `lightning.reward`, for the call `response_id`.

    If the last call was not known, `response_id` is empty, and the call is found by `at`, Unix time in seconds by the agent's
    clock.
    """

    value: float
    name: str = "reward"
    response_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionRun:
    """The version of the policy `policy` that sampled a response from its token `start` on, up to the next `VersionRun`."""

    start: int
    version: int
    policy: str = POLICY


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat messages up to the end of a response of the Responses API, stored as the difference to an earlier response.

    The first `kept` messages are those of the earlier response `after` of the same attempt (empty: there is none), followed by
    `messages`, of which the last is the answer.
    """

    messages: tuple[Json, ...]
    after: str = ""
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Transition:
    """One model call as a step of the agent's MDP: state = `prompt_ids`, action = `response_ids`.

    `(rollout, attempt, seq)` is the idempotency key; `seq` counts the calls of an attempt in the order in which they began.
    With `n > 1` each choice is a transition of its own (same `id`, different `choice`). `versions` starts at token 0
    and has one more entry for each weight update during the call. `constrained` marks calls sampled under a grammar or another
    logit mask: their logprobs are comparable only with a forward pass under the same mask (`lightning.batch.mask_of`).
    `tool_calls` are the ids under which the response called tools, in order, as the agent got them; by these a tool run finds
    its call. `error` is the message that the agent got for a refused call, whose `finish_reason` is the error's code.
    `max_tokens_asked` is the limit that the agent asked for if the context had less room, so that the answer was limited to the
    room that was left; else 0. `requested_model` is the model that the agent asked for. `extras` are bytes of plugins, by the
    plugin's name.

    `untrained` is the reason why the call is not trained, although its agent may be; empty for any other call. `rejects` are
    earlier calls of the attempt that the agent rejected when it sent this one: the reason by the id of the call.

    The extra `texts` holds the request and the reply (read by `lightning_record.exchanges.read`). It is absent if requests are
    not recorded (`gateway.record_requests`), and for all choices of a call but the first. The extra `conversation` holds the
    messages that `previous_response_id` continues (read by `lightning_record.conversation.conversation_in`). It is absent for
    calls through other APIs, with `store` false, or whose text may not be stored.
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
    untrained: str = ""
    rejects: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """The call's idempotency key, `(rollout, attempt, seq)`."""
        return (self.rollout, self.attempt, self.seq)

    @property
    def version(self) -> int:
        """The policy version that sampled the first response token."""
        return self.versions[0].version

    @property
    def policy(self) -> str:
        """The name of the policy that answered; `POLICY` in a run with one."""
        return self.versions[0].policy if self.versions else POLICY

    def __repr__(self) -> str:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        said = (f"{name}={value.tolist() if isinstance(value, memoryview) else value!r}" for name, value in values)
        return f"Transition({', '.join(said)})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy the bytes of the arrays, because views cannot be pickled."""
        arrays = {name: getattr(self, name).tobytes() for name in ("prompt_ids", "response_ids", "logprobs")}
        return _of_bytes, ({each.name: getattr(self, each.name) for each in fields(self)} | arrays,)


@dataclass(frozen=True, slots=True)
class Span:
    """One OpenTelemetry span of an attempt, from any program. Unlike transitions, spans are reported by the agent's side; only
    spans of tools that the model invented are reported by the gateway.

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


def read_reason(reason: object, what: str) -> str:
    """Return the reason why a call is not trained, without spaces around it. Raises `DataError`, naming it `what`, unless it is
    a text of 1 to `LONGEST_REASON` printable ASCII characters, which any HTTP header can carry."""
    text = reason.strip() if isinstance(reason, str) else ""
    if text and len(text) <= LONGEST_REASON and text.isascii() and text.isprintable():
        return text
    raise DataError(
        f"{what} is {reason!r:.120}: say in 1 to {LONGEST_REASON} printable ASCII characters why the call is not trained, such "
        "as 'compaction, rejected'"
    )


def as_texts(given: Iterable[str], what: str) -> tuple[str, ...]:
    """Return a list of texts that a user gave, as a tuple.

    Raises `ConfigError`, naming the argument `what`, for a single text (whose letters would be taken for the list), for
    anything else that is no list, and for an item that is no text.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(f"{what} is {given!r:.200}, not a list of texts: write {what}=[...]")
    texts = tuple(given)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"{what}[{place}] is {text!r:.200}, not a text: give a list of texts")
    return texts


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by their key. Keys, and the items of a key, stay in the order of the input."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def token_ids(values: Iterable[int] | bytes = ()) -> TokenIds:
    """Return integers, or the bytes of an array of them, as the project's token array."""
    return memoryview(array("i", values)).toreadonly()


def logprobs(values: Iterable[float] | bytes = ()) -> LogProbs:
    """Return floats, or the bytes of an array of them, as the project's log-probability array."""
    return cast("LogProbs", memoryview(array("f", values)).toreadonly())


def _of_bytes(values: dict[str, Any]) -> Transition:
    """Return the transition that `Transition.__reduce__` took apart."""
    prompt, response = token_ids(values["prompt_ids"]), token_ids(values["response_ids"])
    return Transition(
        **values | {"prompt_ids": prompt, "response_ids": response, "logprobs": logprobs(values["logprobs"])}
    )


def shared_prefix(one: bytes, other: bytes, item: int = 1) -> int:
    """Return the number of leading items, of `item` bytes each, that both arrays have in common."""
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
    """Return the place inside `value` of the first part that is not JSON (as `['key'][0]`) and what is wrong with it; None if
    all of it is JSON."""
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
