"""`/v1/completions`: OpenAI's older text API, as vLLM offers it.

The invariant: the agent gets the answer that vLLM would have sent it. vLLM leaves out the text of an echo if token ids are
asked for, so the gateway adds it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.gateway.dialects import (
    Capture,
    Dialect,
    Plan,
    check_common,
    choices_of,
    packed_ids,
    refuse_ignored,
    refuse_parameter,
    strip_logprobs,
    take_out,
)
from lightning.gateway.http import Body


@dataclass(slots=True)
class TextPlan(Plan):
    """The plan of a request of this API. `echo` has the text that the gateway puts before each choice; empty for none."""

    echo: list[str] = field(default_factory=list)


class Completions(Dialect):
    """OpenAI completions (the older, raw text API).

    Each choice has its own prompt ids and response ids, so that several prompts in one request (text or token ids) become
    several transitions. An answer with `echo` begins with its prompt. The gateway adds that text, because vLLM 0.31 leaves it
    out when ids are asked for. vLLM itself is asked to echo only if the agent wants logprobs, because a stream of several
    choices can fail in vLLM when the prompt's logprobs come late. An `echo` request whose text is not known here (a prompt of
    token ids, or one that vLLM truncates), or that samples nothing (`max_tokens` 0), is passed on unchanged, without ids.
    """

    path = upstream = "/completions"
    id_prefix = "cmpl-"

    def plan(self, body: Body) -> Plan:
        """Check a request, and ask vLLM (in place) for ids and logprobs, unless it is an `echo` request that must pass
        unchanged. Raises `RefusalError` (422)."""
        refuse_ignored(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise refuse_parameter("prompt", "is missing or empty; send text, token ids, or a list of either.")
        stream, n = check_common(body)
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        keep_logprobs = body.get("logprobs") is not None
        plan = TextPlan(body, stream, n * prompts, n, bool(body.get("return_token_ids")), keep_logprobs)
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
        """Collect ids and logprobs of each choice from a whole answer, or from one chunk of a stream."""
        for said in choices_of(answer):
            choice = capture.choice(said.get("index", 0))
            if (prompt := said.get("prompt_token_ids")) is not None and choice.prompt_ids is None:
                choice.prompt_ids = packed_ids(prompt)
            choice.read(said, _logprobs)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """Add the echo's text to an answer or a chunk, and remove ids and logprobs that the agent did not ask for. Return
        whether anything changed."""
        assert isinstance(plan, TextPlan), "this API's own"
        changed = False
        for choice in choices_of(answer):
            if plan.echo:
                changed |= _echo(choice, plan)
            if not plan.keep_ids:
                if not (plan.echo and plan.stream):  # in a stream with an echo vLLM always sends them
                    changed |= take_out(choice, "prompt_token_ids")
                changed |= take_out(choice, "token_ids")
            changed |= strip_logprobs(choice, plan)
            # With an echo, vLLM adds the prompt's logprobs whenever logprobs are asked for.
            if not plan.keep_logprobs and plan.body.get("prompt_logprobs") is None:
                changed |= take_out(choice, "prompt_logprobs")
        return changed

    def why_no_ids(self, plan: Plan, capture: Capture) -> str:
        """Return why a choice came without ids, with the cure; empty if all have theirs, or with `max_tokens` 0, where nothing
        is sampled."""
        why = "" if plan.body.get("max_tokens") == 0 else super().why_no_ids(plan, capture)
        if why and not plan.body.get("return_token_ids"):
            return "vLLM tells no ids of an echo unless its prompt is a whole text. Send text, or leave 'echo' out"
        return why


def _is_text(prompt: str | list[object]) -> bool:
    return isinstance(prompt, str) or all(isinstance(item, str) for item in prompt)


def _echo(said: Body, plan: TextPlan) -> bool:
    """Put the prompt's text before that of a whole answer or of a stream's first chunk, which has the prompt's ids. In later
    chunks, shift the text offsets of the logprobs. Return whether anything changed."""
    text, holder = plan.echo[said.get("index", 0)], said.get("logprobs")
    if said.get("prompt_token_ids") is None:
        if plan.keep_logprobs and holder:
            holder["text_offset"] = [offset + len(text) for offset in holder["text_offset"]]
        return plan.keep_logprobs
    said["text"] = text + said["text"]
    return True


def _logprobs(holder: Body, count: int) -> list[float | None] | None:
    """Return the last `count` logprobs, those of the answer: with an echo, the prompt's come before them."""
    values: list[float | None] | None = holder.get("token_logprobs")
    return None if values is None else values[-count:]
