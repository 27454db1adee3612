"""OpenAI's older text API before a real vLLM on a CPU; and the fake held against it."""

from __future__ import annotations

import pytest
from lightning.types import CallStatus
from lightning_dialects.completions import Completions

from tests.core.gateway.test_calls import contents
from tests.core.gateway.test_real_vllm import packed_as_json, real, too_long, vllm
from tests.plugins.dialects.test_completions import ECHOES

__all__ = ["real", "vllm"]
pytestmark = pytest.mark.slow


def told(chunks: list[dict]) -> dict[int, tuple[str, list[int], list[list[int]]]]:
    """Each choice's text, prompt and the prompt's offsets, however tokens were put together to chunks: where a letter is
    several tokens, vLLM's offsets of the answer depend on the chunks."""
    found: dict[int, tuple[str, list[int], list[list[int]]]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        text, offsets, prompts = found.get(choice["index"], ("", [], []))
        prompt = [choice["prompt_token_ids"]] if choice["prompt_token_ids"] else []
        logprobs = choice["logprobs"] or {"text_offset": []}
        found[choice["index"]] = (text + choice["text"], offsets + logprobs["text_offset"], prompts + prompt)
    return {
        index: (text, offsets[: sum(map(len, prompts))], prompts) for index, (text, offsets, prompts) in found.items()
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ECHOES)
async def test_an_echo_is_vllms_own_and_is_recorded(real, vllm, asked, stream):
    http = await real.http()
    asked = {"max_tokens": 5, "top_k": 1, "echo": True, "stream": stream, **asked}
    through = await http.post("/completions", json={"model": "policy", **asked})
    plain = await http.post(f"{vllm.url}/v1/completions", json={"model": vllm.model, **asked})
    assert told(contents(through)) == told(contents(plain))
    if not stream and "logprobs" not in asked:  # the last bits of a logprob are anybody's
        assert contents(through) == contents(plain)
    if not stream:
        assert [choice["logprobs"] and choice["logprobs"]["text_offset"] for choice in through.json()["choices"]] == [
            choice["logprobs"] and choice["logprobs"]["text_offset"] for choice in plain.json()["choices"]
        ]
    steps = await real.transitions()
    assert all(0 < len(step.response_ids) == len(step.logprobs) and step.prompt_ids for step in steps)


@pytest.mark.parametrize(
    "asked",
    [
        lambda length: {"prompt": [5] * (length - 3), "max_tokens": 10},
        lambda length: {"prompt": [5] * (length + 20)},
        lambda length: {"prompt": "a b c d " * length, "max_tokens": 2},
        lambda length: {"prompt": "a", "max_tokens": length + 1},
    ],
)
async def test_the_fake_refuses_what_does_not_fit_as_vllm_does(real, vllm, asked):
    _, said, through, step = await too_long(real, vllm, "completions", asked)
    assert step.status is CallStatus.REFUSED
    assert through.json()["error"]["message"].startswith(said.json()["error"]["message"])
    assert through.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_of_several_prompts(real, stream):
    http = await real.http()
    prompts = [[5, 6, 7], [8, 9]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "ignore_eos": True, "stream": stream, "seed": 1}
    assert (await http.post("/completions", json=body)).status_code == 200
    steps = await real.transitions()
    assert [list(step.prompt_ids) for step in steps] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [step.choice for step in steps] == [0, 1, 2, 3]
    assert all(len(step.response_ids) == len(step.logprobs) == 4 for step in steps)


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_logprobs_are_vllms_own(real, vllm, stream):
    """As those of chat are."""
    await packed_as_json(real, vllm, Completions(), stream, logprobs=0)
