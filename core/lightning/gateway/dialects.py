"""The API shapes the gateway speaks: OpenAI's chat, as vLLM speaks it, and those that plugins register.

The invariant: a dialect asks vLLM for token ids and logprobs, reads them out of what passes by, and takes out again
exactly what the agent did not ask for; it adds nothing else and knows nothing of stores, tokens or upstreams.

How a call is sampled stands here, too (law 7): the agent's own parameters are kept unless the configuration or, before it, the
token overrides them. Parameter names and defaults are those of vLLM 0.31 (`ChatCompletionRequest`, started with
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

from lightning.gateway.http import Body, RefusalError, UpstreamError
from lightning.gateway.identity import Claims
from lightning.policy_server.packed_logprobs import FIELD, unpack
from lightning.types import GREEDY_BELOW, LogProbs, TokenIds, logprobs, token_ids

if TYPE_CHECKING:
    from lightning.gateway.policy import Policy

Tokenize = Callable[[Body], Awaitable[tuple[int, bytes]]]
"""Status and body of `/tokenize` for a chat prompt."""
LONGEST_TOOL, LONGEST_ARGUMENTS = 256, 4096
"""Characters kept of the name and the arguments of a tool that the model has invented."""
MOST_INVENTED = 64
"""Such calls kept of one choice."""
SIGN = 3 if sys.byteorder == "little" else 0
"""Which byte of an id has its sign."""
MOST_CHOICES = 16_384
"""vLLM's own limit on `n` (`VLLM_MAX_N_SEQUENCES`); numbers are reserved for every choice before vLLM is asked."""
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
"""The names of the limit of an answer's tokens; of two that are given vLLM takes the first."""
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
"""Values that leave the distribution alone; anything else masks or shifts logits after the temperature."""
GRAMMAR = "structured_outputs"
"""The parameter that holds the answer to a form whenever it is set at all; `has_grammar` knows more of them."""
MASKS = (
    GRAMMAR,
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "use_beam_search",
    "vllm_xargs",
)
"""Parameters that mask or force tokens whenever they are set at all."""
TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning", "tool_reference"})
"""Content parts of a chat message that are text, whatever the field is called that has it; a template writes out a tool that is
referred to."""
COOLEST = 0.01
"""The lowest temperature above 0 that vLLM samples at: it takes this one for all below."""
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
"""Fields that vLLM ignores, silently or with a line in its own log, although without them the agent gets another answer than it
asked for; what only concerns accounts, caches or speed may stay, and `verbosity`, a wish that many clients send unasked."""
REASONING = ("reasoning", "reasoning_content")
"""What a message or a delta calls the model's reasoning."""


@dataclass(slots=True)
class Plan:
    """A request as it goes to vLLM, and what of the answer is the agent's.

    `choices` is how many completions the answer has: `n` for each prompt. `keep_ids` and `keep_logprobs` say that
    the agent asked for these itself, `hides_reasoning` that it wants to see nothing of the model's reasoning. `media` says that
    the prompt has what its token ids say nothing of. `max_tokens_asked` is the limit of an answer for which there was less
    room, `requested_model` the model that the agent named. A dialect that has more to remember of a call has a plan of its own.
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

    def why_no_ids(self, plan: Plan, capture: Capture) -> str:
        """Why a choice came without its ids, with the cure; empty where all have some. Each has one, unless it was aborted."""
        choices = capture.choices.values()
        told = [choice for choice in choices if choice.response_ids or choice.finish_reason == "abort"]
        if len(told) >= plan.choices:
            return ""
        return (
            "the policy server gave no token ids of its answer. Is it a vLLM of a release that lightning takes, and does "
            "nothing between it and the gateway change answers?"
        )

    def refusal(self, refusal: RefusalError) -> bytes:
        """A refusal of the gateway as this API's error object."""
        return refusal.body

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """vLLM's own refusal as this API's error object."""
        return payload


def packed_ids(values: list[int]) -> TokenIds:
    """Token ids from an answer as the project's array; packing first is twice as fast as `array` on a list."""
    return array("i", struct.pack(f"{len(values)}i", *values))


def has_negative(ids: TokenIds) -> bool:
    """Whether an id is below 0. To look at the bytes with the signs takes a twentieth of the time that `min` takes, or less."""
    return not ids.tobytes()[SIGN::4].isascii()


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


def refuse_ignored(body: Body) -> None:
    """Raise `RefusalError` (422) for a field that vLLM would ignore although it changes what is asked for."""
    without_effect = {"best_of": body.get("n") or 1, "function_call": "none"}
    for name, why in IGNORED.items():
        if body.get(name) and body[name] != without_effect.get(name):
            raise refuse_parameter(name, why)


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


def apply_sampling(body: Body, *overrides: Mapping[str, float | int]) -> None:
    """Write overrides into a request, later ones winning; the other name of the token limit is taken out."""
    for override in overrides:
        for name, value in override.items():
            body[name] = value
            if (other := ALIASES.get(name)) is not None and other not in override:
                body.pop(other, None)


def without_limit(body: Body) -> int:
    """Take the limit of the answer's tokens out of a chat's request, so that vLLM takes the room that is left, and return it: 0
    when there was none."""
    given = [limit for name in TOKEN_LIMITS if isinstance(limit := body.pop(name, None), int)]
    return given[0] if given else 0


def call_seed(seed: int, claims: Claims, seq: int) -> int:
    """63 bits that follow from a run's seed, the rollout's place in the run, the attempt and the call's number in it.

    The place is the rollout's id without the run's, so that two runs of one plan sample alike.
    """
    place = claims.rollout.removeprefix(f"{claims.run}/")
    digest = hashlib.blake2b(f"{seed}/{place}/{claims.attempt}/{seq}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def temperature_of(body: Body) -> float:
    """The temperature vLLM will use, of a request that was checked: 1.0 unless the request says otherwise."""
    value = body.get("temperature")
    if value is None:
        return 1.0
    return max(float(value), COOLEST) if value > 0 else float(value)


def is_constrained(body: Body) -> bool:
    """Whether the processed logprobs differ from `log_softmax(logits / temperature)` of an unmasked forward pass.

    Greedy calls count as constrained: vLLM reports their logprobs at temperature 1, so there is no temperature at which
    a forward pass reproduces both the choice and the number.
    """
    return (
        any(body.get(name) not in values for name, values in NEUTRAL.items())
        or any(body.get(name) for name in MASKS)
        or temperature_of(body) < GREEDY_BELOW
        or has_grammar(body)
    )


def has_grammar(body: Body) -> bool:
    """Whether a grammar holds the answer to a form: structured output, a forced or a strict tool."""
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
    """Whether the prompt of a request as it goes to vLLM has what token ids say nothing of: an image, audio, video, a file,
    embeddings. Parts of a type that is not known count as that."""
    messages = body.get("messages")
    contents = (
        [said.get("content") for said in messages if isinstance(said, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return bool(body.get("prompt_embeds")) or any(map(_is_media, parts))


def _is_media(part: object) -> bool:
    """vLLM takes a part without a type by what it has."""
    return isinstance(part, dict) and ("text" not in part if part.get("type") is None else part["type"] not in TEXTS)


def _is_strict(tool: object) -> bool:
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


class Chat(Dialect):
    """OpenAI chat completions.

    Prompt ids are the answer's own `prompt_token_ids`, response ids each choice's `token_ids` (end-of-sequence included), and
    logprobs line up with them one to one or are left out. vLLM gives neither for a call that hides the model's reasoning
    (`include_reasoning`): it is asked for all, and the reasoning is taken out here.
    """

    path = upstream = "/chat/completions"
    id_prefix = "chatcmpl-"

    def plan(self, body: Body) -> Plan:
        """See `Dialect`."""
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
        """See `Dialect`."""
        if (prompt := answer.get("prompt_token_ids")) is not None and capture.prompt_ids is None:
            capture.prompt_ids = packed_ids(prompt)
        for said in choices_of(answer):
            choice = capture.choice(said.get("index", 0))
            choice.read(said, _chat_logprobs)
            message = said.get("delta") or said.get("message")
            if message and (calls := message.get("tool_calls")):
                choice.read_calls(calls, capture.offered)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """See `Dialect`."""
        changed = strip_reasoning(answer, plan)
        changed |= not plan.keep_ids and take_out(answer, "prompt_token_ids")
        for choice in choices_of(answer):
            changed |= not plan.keep_ids and take_out(choice, "token_ids")
            changed |= not plan.keep_logprobs and take_out(choice, "logprobs")
        return changed

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """See `Dialect`. While a tool parser buffers, vLLM sends `{"delta": {}}` chunks only to those who want ids; and what
        has nothing but reasoning only to those who want to see it."""
        if (plan.keep_ids or plan.keep_logprobs) and not plan.hides_reasoning:
            return False
        choices = choices_of(chunk)
        return bool(choices) and all(_says_nothing(said, plan) for said in choices)


def strip_reasoning(answer: Body, plan: Plan) -> bool:
    """Take the model's reasoning, and the ids and logprobs that would show it, out of an answer or a chunk that is not to have
    it, as a vLLM with a parser of tool calls or of reasoning does; return whether anything was."""
    changed = False
    for said in choices_of(answer) if plan.hides_reasoning else ():
        message = said.get("delta") or said.get("message") or {}
        for holder, names in ((message, REASONING), (said, ("token_ids", "logprobs"))):
            for name in names:
                changed |= take_out(holder, name)
    return changed


def _says_nothing(said: Body, plan: Plan) -> bool:
    """Whether a choice of a chunk was sent for its ids or its reasoning alone, of which the agent is shown neither."""
    delta = said.get("delta")
    if said.get("finish_reason") or not isinstance(delta, dict):
        return False
    return not (any(delta[name] for name in delta if name not in REASONING) if plan.hides_reasoning else delta)


def _hides_reasoning(body: Body) -> bool:
    """Whether the agent asked to be shown no reasoning. Raises `RefusalError` (422) where that would change the answer, too."""
    wanted = body.get("include_reasoning")
    if wanted is not None and not isinstance(wanted, bool):
        raise refuse_parameter("include_reasoning", f"must be true or false, not {wanted!r:.80}.")
    if wanted is False and has_grammar(body):  # vLLM would hold the reasoning to the grammar as well
        why = "cannot be false together with structured output, a forced or a strict tool: such a call cannot be recorded."
        raise refuse_parameter("include_reasoning", f"{why} Leave it out, and leave the reasoning aside in the agent.")
    return wanted is False


def _wants_logprobs(body: Body) -> bool:
    """As vLLM decides it: `logprobs` true and `top_logprobs` (default 0) not null."""
    wanted = bool(body.get("logprobs"))
    return wanted and (body.get("top_logprobs", 0) is not None or bool(body.get("logprob_token_ids")))


def _chat_logprobs(holder: Body, count: int) -> list[float | None] | None:
    content = holder.get("content")
    return None if content is None else [token["logprob"] for token in content]
