"""`/v1/chat/completions` and `/v1/completions` as vLLM speaks them.

The invariant: of a chat, prompt ids are the answer's own `prompt_token_ids`, response ids each choice's `token_ids`
(end-of-sequence included), and logprobs line up with them one to one or are left out. vLLM gives neither for a call that hides
the model's reasoning (`include_reasoning`): it is asked for all, and the reasoning is taken out here.

Of a completion, prompt ids and response ids are those of each choice itself, so that several prompts in one request (text or
token ids) become several transitions with their own prompts. An answer with `echo` begins with its prompt. The gateway puts
that text there: for those who ask for ids vLLM 0.31 leaves it out. vLLM itself is asked to echo only for an agent that wants
logprobs: a stream of several choices can fail in it when the logprobs of the prompt come late. Where the text is not known
here (a prompt of token ids, or one that vLLM cuts) and where nothing is to be sampled (`max_tokens` 0), such a request passes
through untouched and without ids of ours.
"""

from __future__ import annotations

from lightning.gateway.dialects.base import (
    Capture,
    Dialect,
    Plan,
    check_common,
    choices_of,
    has_grammar,
    packed_ids,
    refuse_parameter,
    take_out,
)
from lightning.gateway.http import Body

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


class Chat(Dialect):
    """OpenAI chat completions."""

    path = upstream = "/chat/completions"
    id_prefix = "chatcmpl-"

    def plan(self, body: Body) -> Plan:
        """See `Dialect`."""
        _refuse_ignored(body)
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


class Completions(Dialect):
    """OpenAI completions (the older, raw text API)."""

    path = upstream = "/completions"
    id_prefix = "cmpl-"

    def plan(self, body: Body) -> Plan:
        """See `Dialect`."""
        _refuse_ignored(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise refuse_parameter("prompt", "is missing or empty; send text, token ids, or a list of either.")
        stream, n = check_common(body)
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        keep_logprobs = body.get("logprobs") is not None
        plan = Plan(body, stream, n * prompts, n, bool(body.get("return_token_ids")), keep_logprobs)
        if body.get("echo") and not plan.keep_ids:
            if not _is_text(prompt) or body.get("truncate_prompt_tokens") is not None or body.get("max_tokens") == 0:
                return plan
            plan.echo = [text for text in ([prompt] if isinstance(prompt, str) else prompt) for _ in range(n)]
        if body.get("echo") and body.get("max_tokens") != 0:
            body["echo"] = keep_logprobs
        body["return_token_ids"] = True
        if not keep_logprobs and not body.get("logprob_token_ids"):
            body["logprobs"] = 0
        return plan

    def read(self, answer: Body, capture: Capture) -> None:
        """See `Dialect`."""
        for said in choices_of(answer):
            choice = capture.choice(said.get("index", 0))
            if (prompt := said.get("prompt_token_ids")) is not None and choice.prompt_ids is None:
                choice.prompt_ids = packed_ids(prompt)
            choice.read(said, _logprobs)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """See `Dialect`."""
        changed = False
        for choice in choices_of(answer):
            if plan.echo:
                changed |= _echo(choice, plan)
            if not plan.keep_ids:
                if not (plan.echo and plan.stream):  # a stream that echoes has them for everybody
                    changed |= take_out(choice, "prompt_token_ids")
                changed |= take_out(choice, "token_ids")
            changed |= not plan.keep_logprobs and take_out(choice, "logprobs")
            # Of an echo vLLM tells the prompt's logprobs whenever logprobs are asked for.
            if not plan.keep_logprobs and plan.body.get("prompt_logprobs") is None:
                changed |= take_out(choice, "prompt_logprobs")
        return changed


def _refuse_ignored(body: Body) -> None:
    without_effect = {"best_of": body.get("n") or 1, "function_call": "none"}
    for name, why in IGNORED.items():
        if body.get(name) and body[name] != without_effect.get(name):
            raise refuse_parameter(name, why)


def _is_text(prompt: str | list[object]) -> bool:
    return isinstance(prompt, str) or all(isinstance(item, str) for item in prompt)


def _echo(said: Body, plan: Plan) -> bool:
    """Put the prompt's text before a whole answer's, or before the first chunk of a stream: the one with the prompt's ids."""
    text, holder = plan.echo[said.get("index", 0)], said.get("logprobs")
    if said.get("prompt_token_ids") is None:
        if plan.keep_logprobs and holder:
            holder["text_offset"] = [offset + len(text) for offset in holder["text_offset"]]
        return plan.keep_logprobs
    said["text"] = text + said["text"]
    return True


def _logprobs(holder: Body, count: int) -> list[float | None] | None:
    """With echo the prompt's come first."""
    values: list[float | None] | None = holder.get("token_logprobs")
    return None if values is None else values[-count:]
