"""Asks the policy server for the masks under which a call is sampled, and keeps them with the call.

The invariant: a call has masks only if they are whole: one for each response token of each choice. Then the sampler's logprobs
are those of the model's logits, with the request's biases, at the call's temperature, over the kept ids. A call whose logits
are changed in another way has none, and is trained as without this plugin. Calls without a mask ask for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from lightning.bounded import Once
from lightning.gateway.call import Answer, Call
from lightning.gateway.calls import Parts
from lightning.gateway.dialects import NEUTRAL, Choice, is_constrained, temperature_of
from lightning.gateway.http import Body, UpstreamError
from lightning.gateway.stages import CallStage
from lightning.policy_server.launch import PARTS
from lightning.store.rows import LARGEST_EXTRA
from lightning.types import GREEDY_BELOW, CallStatus

from lightning_masks.codes import HEADER, MIDDLEWARE, NAME, WANTED, WORKER
from lightning_masks.extra import written
from lightning_masks.texts import joined

log = logging.getLogger(__name__)

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
OTHER = ("thinking_token_budget", "use_beam_search", "vllm_xargs", "echo")
"""Parameters that change logits, or the choice of tokens, in ways that the trainer does not repeat, and `echo` (`UNKNOWN`)."""
CHANGES = "the trainer does not repeat what it changes"
UNKNOWN = {"echo": "vLLM sends no sampling masks with the prompt's logprobs"}
LARGE = 1 << 13
"""Texts of more characters are read, and compressed again, in a thread."""
LARGEST_BIAS = 100.0
"""vLLM takes a larger bias for this (`SamplingParams.from_optional`)."""
NO_MASKS = (
    "the policy server sent no sampling masks, so that calls with top_p, a grammar or another mask are trained with the ratio "
    f"1. Start vLLM with `--middleware {MIDDLEWARE}` and {PARTS}={WORKER} in its environment, where lightning is installed; "
    "its log says why if it has both (said once)"
)
INCOMPLETE = (
    "the policy server sent sampling masks of a part of a call's tokens alone: such calls are trained with the ratio 1. vLLM "
    "sends none of tokens that came several in a step, as in speculative decoding (said once)"
)
TOO_LARGE = (
    f"the sampling masks of a call are larger than vLLM sends, or than the {LARGEST_EXTRA} bytes that a store takes: such "
    "calls are trained with the ratio 1. Sample fewer tokens, or from fewer ids, such as by top_k (said once)"
)


class MasksStage(CallStage):
    """The stage `masks`."""

    api, after, before = 1, ("branches", "advice", "history"), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._asked = WeakKeyDictionary[Call, Mapping[int, float]]()
        self._said = Once()

    async def sending(self, call: Call, body: Body) -> None:
        """Ask for the masks of a call that is sampled under one, unless the call or its policy is never trained."""
        never = call.frozen or call.untrained or temperature_of(body) < GREEDY_BELOW
        if never or not is_constrained(body):
            return
        if (why := why_not(body)) and self._said.first(why):
            log.info("calls with %s are trained with the ratio 1: %s", why, UNKNOWN.get(why, CHANGES))
        bias = None if why else bias_of(body)
        if bias is not None:
            call.headers.append((HEADER, WANTED))
            self._asked[call] = bias

    async def settled(self, call: Call, answer: Answer) -> None:
        """Keep the masks of an answered call."""
        bias = self._asked.pop(call, None)
        if bias is None or call.untrained or answer.outcome is not CallStatus.OK:
            return
        choices = [choice for choice in call.capture.choices.values() if choice.response_ids]
        for choice in choices:
            if sum(map(len, choice.beside.get(NAME, ()))) > LARGE:
                extra = await asyncio.to_thread(extra_of, choice, bias)
            else:
                extra = extra_of(choice, bias)
            if isinstance(extra, str) or len(extra) > LARGEST_EXTRA:
                self._say(extra if isinstance(extra, str) else TOO_LARGE)
            else:
                choice.extras[NAME] = extra

    def _say(self, what: str) -> None:
        if self._said.first(what):
            log.warning(what)


def why_not(body: Body) -> str:
    """Return the parameter for which a masked call cannot be trained as any other; empty if there is none."""
    penalties = (name for name in PENALTIES if body.get(name) not in NEUTRAL[name])
    return next(penalties, "") or next((name for name in OTHER if body.get(name)), "")


def bias_of(body: Body) -> Mapping[int, float] | None:
    """Return the biases of a request by token id, as vLLM adds them to logits; None if vLLM will refuse them."""
    given = body.get("logit_bias") or {}
    try:
        found = {int(name): float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    if not all(math.isfinite(value) and 0 <= own < 2**31 for own, value in found.items()):
        return None
    return {own: min(LARGEST_BIAS, max(-LARGEST_BIAS, value)) for own, value in found.items()}


def extra_of(choice: Choice, bias: Mapping[int, float]) -> bytes | str:
    """Return the extra with a choice's masks, or what to say if a token has none. Raises `UpstreamError` for masks of another
    shape."""
    texts = choice.beside.get(NAME)
    if not texts:
        return NO_MASKS
    try:
        found = joined(texts)
    except (AttributeError, ValueError) as error:
        raise UpstreamError(f"its answer has sampling masks of another shape ({error})") from error
    if found is None:
        return TOO_LARGE
    size, codes = found
    return written(size, codes, bias) if len(codes) == len(choice.response_ids) else INCOMPLETE
