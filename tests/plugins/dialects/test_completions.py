"""OpenAI's older text API: several prompts, and echoes, as vLLM answers them."""

from __future__ import annotations

import pytest

from tests.core.gateway.test_calls import contents, packed_is_json_and_unseen


async def test_completions_with_text_and_with_ids(house):
    client = await house.client()
    answer = await client.completions.create(model="policy", prompt="once upon")
    assert answer.choices[0].text == house.fake.default.text
    assert answer.choices[0].logprobs is None
    await client.completions.create(model="policy", prompt=[5, 6, 7], logprobs=0)
    first, second = await house.transitions()
    assert first.id == answer.id
    assert first.id.startswith("cmpl-")
    assert list(second.prompt_ids) == [5, 6, 7]
    assert len(second.logprobs) == len(second.response_ids)


async def test_several_prompts_are_several_transitions_with_their_own_prompt(house):
    client = await house.client()
    answer = await client.completions.create(model="policy", prompt=[[5, 6], [7, 8, 9]], n=2)
    assert len(answer.choices) == 4
    steps = await house.transitions()
    assert [list(step.prompt_ids) for step in steps] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert [step.choice for step in steps] == [0, 1, 2, 3]


ECHOES = [
    {"prompt": "once upon"},
    {"prompt": "once upon", "logprobs": 1},
    {"prompt": ["once upon", "a time"], "n": 2},
    {"prompt": "once upon", "return_token_ids": True},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ECHOES)
async def test_an_echo_is_what_vllm_says_and_is_recorded(house, asked, stream):
    http = await house.http()
    asked = {"max_tokens": 5, "echo": True, "stream": stream, **asked}
    through = await http.post("/completions", json={"model": "policy", **asked})
    plain = await http.post(f"{house.fake.url}/v1/completions", json={"model": house.fake.model, **asked})
    assert contents(through) == contents(plain)
    assert "once upon" in through.text or asked.get("return_token_ids")
    steps = await house.transitions()
    assert len(steps) == (4 if "n" in asked else 1)
    assert all(len(step.response_ids) == len(step.logprobs) == 6 for step in steps)
    assert [len(step.prompt_ids) for step in steps] == [2] * len(steps)
    assert house.fake.requests[0].body["echo"] is ("logprobs" in asked), "real vLLM can fail where it echoes and counts"


@pytest.mark.parametrize("asked", [{"prompt": [5, 6]}, {"prompt": "once upon", "truncate_prompt_tokens": 1}])
async def test_an_echo_whose_text_is_not_known_passes_through_and_is_said(house, asked, warnings_of):
    http = await house.http()
    asked = {"max_tokens": 5, "echo": True, **asked}
    through = await http.post("/completions", json={"model": "policy", **asked})
    plain = await http.post(f"{house.fake.url}/v1/completions", json={"model": house.fake.model, **asked})
    assert contents(through) == contents(plain)
    (step,) = await house.transitions()
    assert not step.response_ids
    (said,) = warnings_of()
    assert "leave 'echo' out" in said


async def test_completions_stream(house):
    client = await house.client()
    stream = await client.completions.create(model="policy", prompt=[[4, 5], [6]], stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        assert not getattr(chunk.choices[0], "token_ids", None)
        assert not chunk.choices[0].logprobs
    assert texts == [house.fake.default.text] * 2
    first, second = await house.transitions()
    assert (list(first.prompt_ids), list(second.prompt_ids)) == ([4, 5], [6])
    assert len(first.response_ids) == len(first.logprobs) > 3


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_logprobs_are_those_of_json_and_the_agent_sees_neither(house, stream, caplog):
    await packed_is_json_and_unseen(house, "completions", stream, caplog)


async def test_an_echo_of_which_nothing_is_sampled_misses_no_ids(house, caplog):
    client = await house.client()
    await client.completions.create(model="policy", prompt="once", echo=True, max_tokens=0)
    assert not caplog.records, "ids that were not asked for are not missing"


async def test_a_missing_prompt_is_a_422(house):
    http = await house.http()
    answer = await http.post("/completions", json={"prompt": ""})
    assert answer.status_code == 422
