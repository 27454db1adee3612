"""The seam between one API shape (chat, completions, ...) and the rest of the gateway.

The invariant: a dialect asks vLLM for token ids and logprobs, reads them out of what passes by, and takes out again
exactly what the agent did not ask for; it adds nothing else and knows nothing of stores, tokens or upstreams.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lightning.gateway.http import Body, RefusalError, UpstreamError
from lightning.policy_server.packed_logprobs import FIELD, unpack
from lightning.types import LogProbs, TokenIds, logprobs, token_ids

if TYPE_CHECKING:
    from lightning.gateway.chat_template import Tokenize
    from lightning.gateway.policy import Policy

LONGEST_TOOL, LONGEST_ARGUMENTS = 256, 4096
"""Characters kept of the name and the arguments of a tool that the model has invented."""
MOST_INVENTED = 64
"""Such calls kept of one choice."""
MOST_CHOICES = 16_384
"""vLLM's own limit on `n` (`VLLM_MAX_N_SEQUENCES`); numbers are reserved for every choice before vLLM is asked."""


@dataclass(slots=True)
class Plan:
    """A request as it goes to vLLM, and what of the answer is the agent's.

    `choices` is how many completions the answer has: `n` for each prompt. `keep_ids` and `keep_logprobs` say that
    the agent asked for these itself, `hides_reasoning` that it wants to see nothing of the model's reasoning. `echo` are the
    texts that the choices have to begin with, where vLLM leaves them out because ids were asked for. `media` says that the
    prompt has what its token ids say nothing of. `max_tokens_asked` is the limit of an answer for which there was less room,
    `requested_model` the model that the agent named.
    """

    body: Body
    stream: bool
    choices: int
    n: int
    keep_ids: bool
    keep_logprobs: bool
    temperature: float = 1.0
    constrained: bool = False
    media: bool = False
    max_tokens_asked: int = 0
    requested_model: str = ""
    hides_reasoning: bool = False
    echo: list[str] = field(default_factory=list)


@dataclass(slots=True)
class InventedCall:
    """A call of a tool that the request did not offer. `arguments` is the text that the model wrote, its head if it is long."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One completion as seen so far. `aligned` turns false when some token came without its logprob, `packed` true when they
    came as numbers and not as text (`lightning.policy_server.packed_logprobs`).

    `tool_calls` are the ids of its tool calls, in order, as vLLM made them up and the agent sees them.
    """

    prompt_ids: TokenIds | None = None
    response_ids: TokenIds = field(default_factory=token_ids)
    logprobs: LogProbs = field(default_factory=logprobs)
    aligned: bool = True
    packed: bool = False
    finish_reason: str = ""
    tool_calls: list[str] = field(default_factory=list)
    invented: list[InventedCall] = field(default_factory=list)
    open_calls: dict[int, InventedCall | None] = field(default_factory=dict)

    def read_calls(self, calls: Sequence[Body], offered: Collection[str]) -> None:
        """Take the tool calls of an answer, or what a chunk has of them. Nothing is invented where nothing was `offered`: an
        agent may describe its tools in its own words."""
        for number, call in enumerate(calls):
            name = call.get("id")
            if name and name not in self.tool_calls:
                self.tool_calls.append(name)
            said, index = call.get("function"), call.get("index")
            if not offered or not isinstance(said, dict):
                continue
            place = index if isinstance(index, int) else number
            if isinstance(tool := said.get("name"), str) and tool:
                begun = None if tool in offered else InventedCall(str(name or ""), tool[:LONGEST_TOOL])
                self.open_calls[place] = begun
                if begun is not None and len(self.invented) < MOST_INVENTED:
                    self.invented.append(begun)
            if (invented := self.open_calls.get(place)) is not None and isinstance(text := said.get("arguments"), str):
                invented.arguments = (invented.arguments + text)[:LONGEST_ARGUMENTS]

    def add(self, ids: list[int], values: list[float | None] | LogProbs | None) -> None:
        """Take the ids and logprobs of one answer or one chunk."""
        first = not self.response_ids
        if first:
            self.response_ids = packed_ids(ids)
        else:
            self.response_ids.extend(ids)
        if values is None or len(values) != len(ids):
            self.aligned = False
        elif isinstance(values, array):
            self.packed = True
            self.logprobs.extend(values)
        elif None in values:
            self.aligned = False
        elif first:
            self.logprobs = array("f", struct.pack(f"{len(values)}f", *values))
        else:
            self.logprobs.extend(values)  # type: ignore[arg-type]  # no None among them

    def read(self, said: Body, plain: Callable[[Body, int], list[float | None] | None]) -> None:
        """Take the ids, the logprobs and the finish reason of one choice of an answer or a chunk. `plain` finds the logprobs
        of the last so many tokens where they came as text."""
        if ids := said.get("token_ids"):
            holder = said.get("logprobs") or {}
            packed = holder.get(FIELD)
            self.add(ids, plain(holder, len(ids)) if packed is None else unpack(packed))
        if reason := said.get("finish_reason"):
            self.finish_reason = reason


@dataclass(slots=True)
class Capture:
    """What one call has shown of itself: the id vLLM gave it, the prompt, and each choice by index; or what vLLM broke off or
    refused it with. `offered` are the tools that its request offers."""

    id: str
    prompt_ids: TokenIds | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    failed: str = ""
    refused: str = ""
    offered: frozenset[str] = frozenset()

    def choice(self, index: int) -> Choice:
        """The choice with this index, made when it is first seen."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Choice()
        return found

    def finished(self, expected: int) -> bool:
        """Whether every expected choice has its finish reason."""
        return len(self.choices) >= expected and all(choice.finish_reason for choice in self.choices.values())


class Translator(Protocol):
    """One call of a dialect that is asked of vLLM in another: what the agent sees of vLLM's answer. Methods raise what reading
    an answer of another shape raises."""

    def whole(self, reply: Body) -> Body:
        """The dialect's object for a whole answer."""

    def chunk(self, chunk: Body) -> bytes:
        """The dialect's events for one chunk, possibly none."""

    def end(self) -> bytes:
        """The events that end a stream."""

    def broken(self, refusal: RefusalError) -> bytes:
        """The event that tells that a stream broke off."""

    def answer(self) -> Body:
        """The object for a whole answer that was read; of a stream, what it adds up to."""

    def conversation(self) -> list[Body] | None:
        """The chat messages up to the end of an answer that is complete, which later requests may go on with by its id; None
        where none may."""


class Dialect(ABC):
    """One API shape. `path` is its route below `/v1`, `upstream` vLLM's; `id_prefix` begins the ids of its answers.

    What is here is true of those that vLLM speaks itself: nothing is translated.
    """

    path: str
    upstream: str
    id_prefix: str

    def continues(self, body: Body) -> str | None:
        """The id of the response whose conversation a request goes on with, if it names one."""
        return None

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """The request as `upstream` takes it, after the messages `before` it. Raises `RefusalError` for what cannot be said
        there."""
        return body, None

    def hosted_tools(self, body: Body) -> list[str]:
        """The types of the tools of a request that a provider's servers would run. Raises `RefusalError` (422)."""
        return []

    def without_hosted_tools(self, body: Body) -> Body:
        """The request without them."""
        return body

    async def fit(self, body: Body, policy: Policy, tokenize: Tokenize) -> None:
        """Change a translated request (in place) to what the policy's chat template takes, where the API itself asks for it.
        `tokenize` asks the policy server. Raises `RefusalError`."""
        return

    @abstractmethod
    def plan(self, body: Body) -> Plan:
        """Check a translated request and ask vLLM for ids and logprobs (in place). Raises `RefusalError` (422)."""

    @abstractmethod
    def read(self, answer: Body, capture: Capture) -> None:
        """Collect ids and logprobs from a whole answer, or from one chunk of a stream."""

    @abstractmethod
    def strip(self, answer: Body, plan: Plan) -> bool:
        """Take out of an answer or a chunk what the agent did not ask for; return whether anything was."""

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """Whether vLLM would not have sent this chunk, had we not asked for ids."""
        return False

    def refusal(self, refusal: RefusalError) -> bytes:
        """A refusal of the gateway as this API's error object."""
        return refusal.body

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """vLLM's own refusal as this API's error object."""
        return payload


def why_no_ids(plan: Plan, capture: Capture) -> str:
    """Why a choice came without its ids, with the cure; empty where all have some. Each has one, unless it was aborted."""
    body, choices = plan.body, capture.choices.values()
    told = [choice for choice in choices if choice.response_ids or choice.finish_reason == "abort"]
    if len(told) >= plan.choices or body.get("max_tokens") == 0:
        return ""
    if not body.get("return_token_ids"):
        return "vLLM tells no ids of an echo unless its prompt is a whole text. Send text, or leave 'echo' out"
    return (
        "the policy server gave no token ids of its answer. Is it a vLLM of a release that lightning takes, and does nothing "
        "between it and the gateway change answers?"
    )


def packed_ids(values: list[int]) -> TokenIds:
    """Token ids from an answer as the project's array; packing first is twice as fast as `array` on a list."""
    return array("i", struct.pack(f"{len(values)}i", *values))


def refuse_parameter(name: str, why: str) -> RefusalError:
    """A 422 for a parameter the gateway itself has to understand."""
    return RefusalError(422, "invalid_parameter", f"{name!r} {why}", param=name)


def check_common(body: Body) -> tuple[bool, int]:
    """Check what the gateway relies on: `stream`, `n` and the temperature; everything else is vLLM's to judge. Returns the
    first two."""
    stream, n = body.get("stream"), body.get("n")
    if stream is not None and not isinstance(stream, bool):
        raise refuse_parameter("stream", f"must be true or false, not {stream!r}.")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES):
        raise refuse_parameter("n", f"must be an integer from 1 to {MOST_CHOICES}, not {n!r}.")
    temperature = body.get("temperature")
    # vLLM would read "0.2" as a number: sampled at that and recorded as another it would mislead.
    if temperature is not None and not _is_number(temperature):
        raise refuse_parameter("temperature", f"must be a number or null, not {temperature!r:.80}.")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise refuse_parameter(
            "stream_options", f"must be an object such as {{'include_usage': true}}, not {options!r}."
        )
    if options is not None and not stream:
        raise refuse_parameter("stream_options", "is only allowed together with 'stream': true.")
    return bool(stream), n or 1


def _is_number(value: object) -> bool:
    """Whether a value of JSON is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def error_text(answer: Body) -> str:
    """The message of an error object that came in place of an answer, or an empty string."""
    error = answer.get("error")
    if error is None:
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "unknown error")


def choices_of(answer: Body) -> list[Body]:
    """The `choices` of an answer. Raises `UpstreamError` when it has none, which vLLM's always have."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise UpstreamError("its answer is not shaped like vLLM's (it has no list of 'choices')")
    return choices


def take_out(holder: Body, name: str) -> bool:
    """Set a field that vLLM filled only for us back to the null it would have had."""
    if holder.get(name) is None:
        return False
    holder[name] = None
    return True


def offered_tools(body: Body) -> frozenset[str]:
    """The names of the tools that a chat request offers."""
    tools = body.get("tools")
    kinds = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(kind["name"] for kind in kinds if isinstance(kind, dict) and isinstance(kind.get("name"), str))
