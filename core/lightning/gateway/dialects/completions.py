"""`/v1/completions` as vLLM speaks it: text or token-id prompts, one or many.

The invariant: prompt ids and response ids are those of each choice itself, so that several prompts in one request become
several transitions with their own prompts. Requests with `echo` pass through untouched and without ids of ours:
asking for ids would make vLLM leave the echoed text out (it does in 0.31), which would change what the agent sees.
"""

from __future__ import annotations

from lightning.gateway.dialects.base import (
    Capture,
    Choice,
    Native,
    Plan,
    check_common,
    choices_of,
    packed_ids,
    refuse_parameter,
    take_out,
)
from lightning.gateway.sampling import Body


class Completions(Native):
    """OpenAI completions (the older, raw text API)."""

    path = upstream = "/completions"
    id_prefix = "cmpl-"

    def plan(self, body: Body) -> Plan:
        """See `Dialect`."""
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise refuse_parameter("prompt", "is missing or empty; send text, token ids, or a list of either.")
        stream, n = check_common(body)
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        keep_logprobs = body.get("logprobs") is not None
        plan = Plan(body, stream, n * prompts, n, bool(body.get("return_token_ids")), keep_logprobs)
        if not body.get("echo"):
            body["return_token_ids"] = True
            if not keep_logprobs and not body.get("logprob_token_ids"):
                body["logprobs"] = 0
        return plan

    def read_reply(self, reply: Body, capture: Capture) -> None:
        """See `Dialect`."""
        capture.id = reply.get("id") or capture.id
        self.read_chunk(reply, capture)

    def read_chunk(self, chunk: Body, capture: Capture) -> None:
        """See `Dialect`."""
        for said in choices_of(chunk):
            choice = capture.choice(said.get("index", 0))
            if (prompt := said.get("prompt_token_ids")) is not None and choice.prompt_ids is None:
                choice.prompt_ids = packed_ids(prompt)
            _read_choice(said, choice)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """See `Dialect`."""
        changed = False
        for choice in choices_of(answer):
            if not plan.keep_ids:
                changed |= take_out(choice, "prompt_token_ids")
                changed |= take_out(choice, "token_ids")
            changed |= not plan.keep_logprobs and take_out(choice, "logprobs")
        return changed

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """See `Dialect`. vLLM's text chunks do not depend on what else was asked for."""
        return False


def _read_choice(said: Body, choice: Choice) -> None:
    ids = said.get("token_ids")
    if ids:
        holder = said.get("logprobs")
        values = holder.get("token_logprobs") if holder else None
        # With echo (and ids asked for by the agent itself) the prompt's logprobs come first.
        choice.add(ids, None if values is None else values[-len(ids) :])
    if reason := said.get("finish_reason"):
        choice.finish_reason = reason
