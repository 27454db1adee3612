"""How a call was sampled: which parameters win, and whether its logprobs can be compared with an unmasked forward pass.

The invariant (law 7): the agent's own parameters are kept unless the configuration or, before it, the token overrides them.
Parameter names and defaults are those of vLLM 0.31 (`ChatCompletionRequest`, `CompletionRequest`, started with
`--generation-config vllm`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lightning.gateway.http import Body
from lightning.gateway.identity import Claims
from lightning.types import GREEDY_BELOW

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
