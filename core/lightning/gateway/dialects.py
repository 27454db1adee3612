"""The dialects (APIs) of the gateway: the base class, OpenAI's chat as vLLM speaks it, and how calls are sampled.

The invariant: a dialect asks vLLM for token ids and logprobs, reads them from the answer, and removes exactly the fields that
the agent did not ask for. It adds nothing else, and knows nothing of stores, tokens or upstreams.

Sampling follows law 7: the agent's own parameters are kept unless the configuration overrides them, or the token, which
overrides both. Names and defaults of parameters are those of vLLM 0.31 (`ChatCompletionRequest`, started with
`--generation-config vllm`).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lightning.gateway.http import Body, RefusalError, UpstreamError
from lightning.gateway.identity import Claims
from lightning.policy_server.packed_logprobs import BESIDE, FIELD, unpack, unpack_ids
from lightning.types import GREEDY_BELOW

if TYPE_CHECKING:
    from lightning.gateway.policy import Policy

Tokenize = Callable[[Body], Awaitable[tuple[int, bytes]]]
"""Asks the policy server's `/tokenize` for a chat prompt, and returns the status and the body."""
LONGEST_TOOL, LONGEST_ARGUMENTS = 256, 4096
"""The most characters that are kept of the name, and of the arguments, of a call of an unknown tool."""
MOST_INVENTED = 64
"""The most calls of unknown tools that are kept of one choice."""
MOST_CHOICES = 16_384
"""vLLM's limit on `n` (`VLLM_MAX_N_SEQUENCES`). It is checked here because the gateway numbers all choices before it asks
vLLM."""
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
"""The names of the limit of an answer's tokens. If a request has both, vLLM takes the first."""
ALIASES = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_tokens": (0, None),
}
"""Values of parameters that do not change the distribution; other values mask or shift logits after the temperature."""
GRAMMAR = "structured_outputs"
"""The parameter that constrains the answer by a grammar whenever it is set. `has_grammar` knows the other ways."""
MASKS = (
    GRAMMAR,
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "use_beam_search",
    "vllm_xargs",
)
"""Parameters that mask or force tokens whenever they are set."""
TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning", "tool_reference"})
"""Types of content parts of a chat message that are text. A `tool_reference` is among them, because a chat template writes the
tool out."""
COOLEST = 0.01
"""The lowest temperature above 0 at which vLLM samples; it raises lower ones to this."""
_ELSEWHERE = "runs on OpenAI's servers, and vLLM would ignore it. Give the agent a tool that does it."
_UNHELD = "was taken out of vLLM, which would ignore it and hold the answer to nothing. Send 'structured_outputs'."
IGNORED = {
    "functions": "is OpenAI's older form, which vLLM ignores: the model would never hear of them. Send them as 'tools'.",
    "function_call": "is OpenAI's older form, which vLLM ignores. Send 'tool_choice'.",
    "web_search_options": _ELSEWHERE,
    "audio": "asks for speech, and the policy writes text: vLLM would ignore it. Leave it out.",
    "best_of": "was taken out of vLLM, which would ignore it. Send 'n', and choose in the agent.",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), _UNHELD),
}
"""Fields that vLLM ignores although they change the requested answer, with the reason for the refusal. Ignored fields about
accounts, caches or speed are let through, and so is `verbosity`, which many clients send by default."""
REASONING = ("reasoning", "reasoning_content")
"""The fields of a message or a delta that hold the model's reasoning."""


@dataclass(slots=True)
class Plan:
    """The request for vLLM, and which fields of the answer the agent asked for.

    `choices` is the number of completions in the answer: `n` for each prompt. With `keep_ids` and `keep_logprobs` the agent
    itself asked for ids and logprobs; with `hides_reasoning` it asked not to see the model's reasoning. `media` says that the
    prompt has content, such as images, that its token ids do not show. `max_tokens_asked` is a token limit that was removed
    because there was less room; 0 otherwise. `requested_model` is the model that the agent named. A dialect that keeps more of
    a call derives its own class.
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


@dataclass(slots=True)
class InventedCall:
    """A call of a tool that the request did not offer. `arguments` is the beginning of the arguments, as the model wrote
    them."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One completion as read so far. `aligned` is false if a token came without its logprob; `packed` is true if the logprobs
    came as numbers and not as text (`lightning.policy_server.packed_logprobs`).

    `tool_calls` are the ids of its tool calls in order, which vLLM made and the agent sees. `invented` are its calls of unknown
    tools; `open_calls` has the calls of a stream by their index, with None for a known tool.

    `beside` are the texts that middleware in vLLM sent beside the logprobs, one for each chunk, by the plugin's name. `extras`
    are stored with this choice, besides those of the call.
    """

    prompt_ids: array[int] | None = None
    response_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    aligned: bool = True
    packed: bool = False
    finish_reason: str = ""
    tool_calls: list[str] = field(default_factory=list)
    invented: list[InventedCall] = field(default_factory=list)
    beside: dict[str, list[str]] = field(default_factory=dict)
    extras: dict[str, bytes] = field(default_factory=dict)
    open_calls: dict[int, InventedCall | None] = field(default_factory=dict)

    def read_calls(self, calls: Sequence[Body], offered: Collection[str]) -> None:
        """Read the tool calls of an answer, or their parts in a chunk. A call of a tool that is not among the `offered` ones is
        invented, unless none was offered: then the agent may have described its tools in the prompt."""
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

    def add(self, ids: list[int], values: list[float | None] | array[float] | None) -> None:
        """Append the token ids and logprobs of an answer or a chunk. `values` is None if there are no logprobs."""
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
        """Read the ids, the logprobs and the finish reason of one choice of an answer or a chunk. `plain` returns the logprobs
        of the last tokens, as many as it is asked for, if they came as text."""
        if ids := said.get("token_ids"):
            holder = said.get("logprobs") or {}
            packed = holder.get(FIELD)
            for name, text in (holder.get(BESIDE) or {}).items():
                self.beside.setdefault(name, []).append(text)
            self.add(ids, plain(holder, len(ids)) if packed is None else unpack(packed))
        if reason := said.get("finish_reason"):
            self.finish_reason = reason


@dataclass(slots=True)
class Capture:
    """The answer to one call as read so far: the id that vLLM gave it, the prompt's token ids, and each choice by its index.
    `failed` is vLLM's error if it broke off, `refused` its error if it refused the call. `offered` are the tools in the
    request."""

    id: str
    prompt_ids: array[int] | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    failed: str = ""
    refused: str = ""
    offered: frozenset[str] = frozenset()

    def choice(self, index: int) -> Choice:
        """Return the choice with this index; make it if there is none."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Choice()
        return found

    def finished(self, expected: int) -> bool:
        """Return whether all of the `expected` choices have a finish reason."""
        return len(self.choices) >= expected and all(choice.finish_reason for choice in self.choices.values())


class Translator(Protocol):
    """Translates vLLM's answer to one call into a dialect that vLLM does not speak. Methods raise `SHAPE_ERRORS` of
    `lightning.gateway.call` for an answer of another shape."""

    def whole(self, reply: Body) -> Body:
        """Return the dialect's object for a whole answer of vLLM."""

    def chunk(self, chunk: Body) -> bytes:
        """Return the dialect's events for one chunk of vLLM's stream; they may be empty."""

    def end(self) -> bytes:
        """Return the events that end a stream."""

    def broken(self, refusal: RefusalError) -> bytes:
        """Return the event which tells the agent that the stream broke off."""

    def answer(self) -> Body:
        """Return the dialect's object for the answer that was read, also for a stream."""

    def conversation(self) -> list[Body] | None:
        """Return the chat messages up to the end of a complete answer, which a later request may continue by the answer's id;
        None if no request may."""


class Dialect(ABC):
    """An API of the gateway. `path` is its route below `/v1`, `upstream` the route of vLLM that it is sent to; `id_prefix`
    begins the ids of its answers.

    The methods here are for an API that vLLM speaks itself: they translate nothing.
    """

    path: str
    upstream: str
    id_prefix: str

    def continues(self, body: Body) -> str | None:
        """Return the id of the earlier response that a request continues; None if it names none."""
        return None

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """Return the request for `upstream`, behind the messages `before` it, and the translator of the answer; None if nothing
        is translated. Raises `RefusalError` for a request that `upstream` cannot express."""
        return body, None

    async def fit(self, body: Body, policy: Policy, tokenize: Tokenize, name: str | None) -> None:
        """Change a translated request in place so that the policy's chat template takes it, if the API requires that.
        `tokenize` asks a policy server of the run's policy with this `name` (None: any). Raises `RefusalError`."""
        return

    @abstractmethod
    def plan(self, body: Body) -> Plan:
        """Check a translated request, and change it in place so that vLLM returns ids and logprobs. Raises `RefusalError`
        (422)."""

    @abstractmethod
    def read(self, answer: Body, capture: Capture) -> None:
        """Add the ids and logprobs of a whole answer, or of a chunk, to `capture`."""

    @abstractmethod
    def strip(self, answer: Body, plan: Plan) -> bool:
        """Remove the fields that the agent did not ask for from an answer or a chunk; return whether there were any."""

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """Return whether vLLM sent this chunk only because the gateway asked for ids."""
        return False

    def why_no_ids(self, plan: Plan, capture: Capture) -> str:
        """Return why a choice came without token ids, with the cure; empty if all choices have some, except aborted ones."""
        choices = capture.choices.values()
        told = [choice for choice in choices if choice.response_ids or choice.finish_reason == "abort"]
        if len(told) >= plan.choices:
            return ""
        return (
            "the policy server gave no token ids of its answer. Is it a vLLM of a release that lightning takes, and does "
            "nothing between it and the gateway change answers?"
        )

    def refusal(self, refusal: RefusalError) -> bytes:
        """Return the error object of this API for a refusal of the gateway."""
        return refusal.body

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """Return the error object of this API for a refusal of vLLM."""
        return payload


def packed_ids(values: list[int] | str) -> array[int]:
    """Return the token ids of an answer as an `array('i')`. Packing a list first is twice as fast as `array` on it."""
    return unpack_ids(values) if isinstance(values, str) else array("i", struct.pack(f"{len(values)}i", *values))


def has_negative(ids: array[int]) -> bool:
    """Return whether one of some ids is below 0."""
    return bool(np.frombuffer(ids, np.int32).min(initial=0) < 0)


def refuse_parameter(name: str, why: str) -> RefusalError:
    """Return the refusal (422) of a parameter, which says `why`."""
    return RefusalError(422, "invalid_parameter", f"{name!r} {why}", param=name)


def check_common(body: Body) -> tuple[bool, int]:
    """Check the parameters that the gateway relies on, and return `stream` and `n`. Raises `RefusalError` (422). All other
    parameters are left to vLLM."""
    stream, n = body.get("stream"), body.get("n")
    if stream is not None and not isinstance(stream, bool):
        raise refuse_parameter("stream", f"must be true or false, not {stream!r}.")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHOICES):
        raise refuse_parameter("n", f"must be an integer from 1 to {MOST_CHOICES}, not {n!r}.")
    temperature = body.get("temperature")
    # vLLM would read "0.2" as a number, and the call would be sampled at another temperature than is recorded.
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
    """Return whether a JSON value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def error_text(answer: Body) -> str:
    """Return the message of an error object that came in place of an answer; empty for an answer."""
    error = answer.get("error")
    if error is None:
        return ""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "unknown error")


def refuse_ignored(body: Body) -> None:
    """Raise `RefusalError` (422) for a field that vLLM would ignore although it changes the requested answer."""
    without_effect = {"best_of": body.get("n") or 1, "function_call": "none"}
    for name, why in IGNORED.items():
        if body.get(name) and body[name] != without_effect.get(name):
            raise refuse_parameter(name, why)


def choices_of(answer: Body) -> list[Body]:
    """Return the `choices` of an answer. Raises `UpstreamError` for an answer without them, which is not vLLM's."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise UpstreamError("its answer is not shaped like vLLM's (it has no list of 'choices')")
    return choices


def take_out(holder: Body, name: str) -> bool:
    """Set a field, which vLLM filled because the gateway asked for it, to null; return whether it was filled."""
    if holder.get(name) is None:
        return False
    holder[name] = None
    return True


def offered_tools(body: Body) -> frozenset[str]:
    """Return the names of the tools in a chat request."""
    tools = body.get("tools")
    kinds = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(kind["name"] for kind in kinds if isinstance(kind, dict) and isinstance(kind.get("name"), str))


def apply_sampling(body: Body, *overrides: Mapping[str, float | int]) -> None:
    """Write overrides into a request in order. An override of the token limit also removes the limit's other name."""
    for override in overrides:
        for name, value in override.items():
            body[name] = value
            if (other := ALIASES.get(name)) is not None and other not in override:
                body.pop(other, None)


def without_limit(body: Body) -> int:
    """Remove the limit of the answer's tokens from a chat request, so that vLLM uses the room that is left. Return the limit; 0
    if there was none."""
    given = [limit for name in TOKEN_LIMITS if isinstance(limit := body.pop(name, None), int)]
    return given[0] if given else 0


def call_seed(seed: int, claims: Claims, seq: int) -> int:
    """Return a seed of 63 bits for a call, derived from the run's seed, the rollout, the attempt and the call's number in it.

    The rollout's id is taken without the run's, so that two runs with the same settings sample alike.
    """
    place = claims.rollout.removeprefix(f"{claims.run}/")
    digest = hashlib.blake2b(f"{seed}/{place}/{claims.attempt}/{seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def temperature_of(body: Body) -> float:
    """Return the temperature at which vLLM will sample a checked request; 1.0 if the request has none."""
    value = body.get("temperature")
    if value is None:
        return 1.0
    return max(float(value), COOLEST) if value > 0 else float(value)


def is_constrained(body: Body) -> bool:
    """Return whether vLLM's logprobs differ from `log_softmax(logits / temperature)` of an unmasked forward pass.

    Greedy calls are constrained, because vLLM reports their logprobs at temperature 1: no temperature reproduces both the
    choice and the logprob.
    """
    return (
        any(body.get(name) not in values for name, values in NEUTRAL.items())
        or any(body.get(name) for name in MASKS)
        or temperature_of(body) < GREEDY_BELOW
        or has_grammar(body)
    )


def has_grammar(body: Body) -> bool:
    """Return whether a grammar constrains the answer: structured output, a forced tool or a strict tool."""
    if body.get(GRAMMAR):
        return True
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type", "text") != "text":
        return True
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    tools = body.get("tools")
    return choice != "none" and isinstance(tools, list) and any(map(_is_strict, tools))


def has_media(body: Body) -> bool:
    """Return whether the prompt of a request for vLLM has content that token ids do not show: images, audio, video, files,
    embeddings, or parts of an unknown type."""
    messages = body.get("messages")
    contents = (
        [said.get("content") for said in messages if isinstance(said, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return bool(body.get("prompt_embeds")) or any(map(_is_media, parts))


def _is_media(part: object) -> bool:
    """Return whether a content part is not text. A part without a type is text if it has the field `text`, as in vLLM."""
    return isinstance(part, dict) and ("text" not in part if part.get("type") is None else part["type"] not in TEXTS)


def _is_strict(tool: object) -> bool:
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


class Chat(Dialect):
    """OpenAI's chat completions.

    Prompt ids are the answer's `prompt_token_ids`, response ids each choice's `token_ids`, with the end-of-sequence token.
    There is one logprob for each response id, or none at all. For a call that hides the model's reasoning (`include_reasoning`)
    vLLM gives neither ids nor logprobs, so the gateway asks for the reasoning and removes it from the answer.
    """

    path = upstream = "/chat/completions"
    id_prefix = "chatcmpl-"

    def plan(self, body: Body) -> Plan:
        """Check a chat request and ask vLLM for ids and logprobs (`Dialect.plan`)."""
        refuse_ignored(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refuse_parameter("messages", "is missing or empty; send a list of chat messages.")
        for number, message in enumerate(messages):
            if isinstance(message, dict) and message.get("function_call"):
                why = "is OpenAI's older form, which vLLM leaves out of the prompt. Send 'tool_calls'."
                raise refuse_parameter(f"messages[{number}].function_call", why)
        stream, n = check_common(body)
        hides = _hides_reasoning(body)
        plan = Plan(
            body, stream, n, n, bool(body.get("return_token_ids")), _wants_logprobs(body), hides_reasoning=hides
        )
        if hides:
            body["include_reasoning"] = True
        body["return_token_ids"] = True
        if not plan.keep_logprobs and not body.get("top_logprobs"):
            body["logprobs"], body["top_logprobs"] = True, 0
        return plan

    def read(self, answer: Body, capture: Capture) -> None:
        """Add the ids and logprobs of an answer or a chunk to `capture` (`Dialect.read`)."""
        if (prompt := answer.get("prompt_token_ids")) is not None and capture.prompt_ids is None:
            capture.prompt_ids = packed_ids(prompt)
        for said in choices_of(answer):
            choice = capture.choice(said.get("index", 0))
            choice.read(said, _chat_logprobs)
            message = said.get("delta") or said.get("message")
            if message and (calls := message.get("tool_calls")):
                choice.read_calls(calls, capture.offered)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """Remove the fields that the agent did not ask for (`Dialect.strip`)."""
        changed = strip_reasoning(answer, plan)
        changed |= not plan.keep_ids and take_out(answer, "prompt_token_ids")
        for choice in choices_of(answer):
            changed |= not plan.keep_ids and take_out(choice, "token_ids")
            changed |= strip_logprobs(choice, plan)
        return changed

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """Return whether vLLM sent a chunk only because the gateway asked for ids or reasoning. While a tool parser buffers, it
        sends chunks with an empty delta only to clients that want ids."""
        if (plan.keep_ids or plan.keep_logprobs) and not plan.hides_reasoning:
            return False
        choices = choices_of(chunk)
        return bool(choices) and all(_says_nothing(said, plan) for said in choices)


def strip_logprobs(choice: Body, plan: Plan) -> bool:
    """Remove a choice's logprobs if the agent did not ask for them, and else what plugins get beside them. Return whether
    there was anything to remove."""
    if not plan.keep_logprobs:
        return take_out(choice, "logprobs")
    return bool((choice.get("logprobs") or {}).pop(BESIDE, None))


def strip_reasoning(answer: Body, plan: Plan) -> bool:
    """Remove the model's reasoning, and the ids and logprobs that would show it, from an answer or a chunk if the agent asked
    not to see it. A vLLM with a parser of tool calls or reasoning does the same. Return whether there was anything to
    remove."""
    changed = False
    for said in choices_of(answer) if plan.hides_reasoning else ():
        message = said.get("delta") or said.get("message") or {}
        for holder, names in ((message, REASONING), (said, ("token_ids", "logprobs"))):
            for name in names:
                changed |= take_out(holder, name)
    return changed


def _says_nothing(said: Body, plan: Plan) -> bool:
    """Return whether a choice of a chunk has nothing for the agent: only ids, or only reasoning that the agent hides."""
    delta = said.get("delta")
    if said.get("finish_reason") or not isinstance(delta, dict):
        return False
    return not (any(delta[name] for name in delta if name not in REASONING) if plan.hides_reasoning else delta)


def _hides_reasoning(body: Body) -> bool:
    """Return whether the agent asked not to see the reasoning. Raises `RefusalError` (422) if that would change the answer."""
    wanted = body.get("include_reasoning")
    if wanted is not None and not isinstance(wanted, bool):
        raise refuse_parameter("include_reasoning", f"must be true or false, not {wanted!r:.80}.")
    if wanted is False and has_grammar(body):  # with the reasoning included vLLM would apply the grammar to it, too
        why = "cannot be false together with structured output, a forced or a strict tool: such a call cannot be recorded."
        raise refuse_parameter("include_reasoning", f"{why} Leave it out, and leave the reasoning aside in the agent.")
    return wanted is False


def _wants_logprobs(body: Body) -> bool:
    """Return whether the agent asked for logprobs, as vLLM decides it: `logprobs` is true and `top_logprobs` (default 0) is not
    null, unless `logprob_token_ids` are given."""
    wanted = bool(body.get("logprobs"))
    return wanted and (body.get("top_logprobs", 0) is not None or bool(body.get("logprob_token_ids")))


def _chat_logprobs(holder: Body, count: int) -> list[float | None] | None:
    content = holder.get("content")
    return None if content is None else [token["logprob"] for token in content]
