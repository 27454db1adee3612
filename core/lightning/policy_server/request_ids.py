"""How vLLM names, inside its engine, the requests that the gateway sent: the way back to the id in `x-request-id`.

The invariant: two requests of one gateway never share a key, and a name that was not made by these rules stays as it is.

    chat completion    chatcmpl-{id}-{8 hex digits}
    completion         cmpl-{id}-{prompt}-{8 hex digits}
    with n > 1         {choice}_ in front of either

The digits are vLLM's own (`InputProcessor.assign_request_id`); it leaves them out when told to by
`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION`. Read in vLLM 0.27.1, 0.31.0 and 0.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHAT = re.compile(r"(?:(?P<choice>\d+)_)?chatcmpl-(?P<id>.+)", re.DOTALL)
_COMPLETION = re.compile(r"(?:(?P<choice>\d+)_)?cmpl-(?P<id>.+)-(?P<prompt>\d+)", re.DOTALL)


def client_key(engine_id: str, *, randomized: bool = True) -> str:
    """The key of `Update.in_flight` for the engine's request id: `{id}`, or `{choice}_{id}` with several choices.

    A completions call with several prompts is several requests: with n = 1 the number of the prompt is the number of the
    choice (the first prompt's key stays the bare id); with n > 1 the later prompts keep `-{prompt}` behind the id,
    because the engine no longer knows n.
    """
    name = _SUFFIX.sub("", engine_id) if randomized else engine_id
    if match := _CHAT.fullmatch(name):
        return _key(match["choice"], match["id"])
    if match := _COMPLETION.fullmatch(name):
        choice, prompt = match["choice"], match["prompt"]
        if prompt == "0":
            return _key(choice, match["id"])
        return _key(prompt, match["id"]) if choice is None else _key(choice, f"{match['id']}-{prompt}")
    return name


def client_counts(engine_counts: Mapping[str, int], *, randomized: bool = True) -> dict[str, int]:
    """The same counts by `client_key`; of two tries under one id the further one counts."""
    counts: dict[str, int] = {}
    for engine_id, tokens in engine_counts.items():
        key = client_key(engine_id, randomized=randomized)
        counts[key] = max(tokens, counts.get(key, 0))
    return counts


def _key(choice: str | None, request_id: str) -> str:
    return request_id if choice is None else f"{choice}_{request_id}"
