"""The recipe: what a model is taught is what a policy server shows it, and it is learnt."""

from __future__ import annotations

import json

import pytest
import torch
from lightning_examples.recipe.chatml import END, START, Conversation, Row, build_tokenizer, encode, render, tool_call
from lightning_examples.recipe.model import build, save, tiny_config
from lightning_examples.recipe.pretrain import Muon, Plan, Stage, batch_loss, orthogonalize, pretrain
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def test_a_conversation_is_rendered_as_chatml_with_hermes_tool_calls() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
    now = {"type": "function", "function": {"name": "now"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        tool_call("call-0", "add", {"a": "1", "b": "ü"}),
        {"role": "tool", "tool_call_id": "call-0", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    assert render(Conversation(messages, [tool, now])) == (
        "<|im_start|>system\nBe brief.\ntools: add(a, b) now()<|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": "1", "b": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3.<|im_end|>\n"
    )


def test_arguments_are_rendered_alike_as_text_and_as_an_object(tokenizer: PreTrainedTokenizerFast) -> None:
    # A policy server parses the argument text before it renders the template; the API's user sends it as text.
    message = tool_call("call-0", "add", {"a": '1 < 2 & "3"', "b": "ü"})
    parsed = json.loads(json.dumps(message))
    function = parsed["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    for content in (None, ""):
        assert render(Conversation([{**parsed, "content": content}])) == render(Conversation([message]))
    del parsed["content"]
    assert render(Conversation([parsed])) == render(Conversation([message]))


def test_every_prompt_of_a_demonstration_is_a_prefix_of_it(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> None:
    for conversation in conversations:
        row = encode(tokenizer, conversation)
        for turn, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            text = tokenizer.apply_chat_template(
                list(conversation.messages[:turn]),
                tools=list(conversation.tools),
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt = tokenizer.encode(text)
            assert row.ids[: len(prompt)] == prompt
            assert not row.trained[len(prompt) - 1]
            assert row.trained[len(prompt)]


def test_exactly_what_the_assistant_wrote_is_trained(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> None:
    for conversation in conversations:
        row = encode(tokenizer, conversation)
        text = tokenizer.decode([i for i, trained in zip(row.ids, row.trained, strict=True) if trained])
        parts = render(conversation).split(f"{START}assistant\n")[1:]
        assert text == "".join(part[: part.index(END)] + END for part in parts)


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Zoë paid 1234567 ¥ for  'things'\n\t<tool_call> {\"a\": -5.0}"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tool_marks_stay_visible_and_single(tokenizer: PreTrainedTokenizerFast) -> None:
    for mark in ("<tool_call>", "</tool_call>"):
        ids = tokenizer.encode(mark, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == mark


def test_the_vocabulary_is_as_large_as_asked_at_most() -> None:
    assert len(build_tokenizer(["some words and more words"], vocab_size=280)) <= 280


def test_muon_makes_matrices_orthogonal() -> None:
    matrices = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalize(matrices, steps=8))
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.5


def test_muon_treats_stacked_matrices_as_it_treats_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 16), (16, 8), (8, 16), (8, 8)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    together = [torch.nn.Parameter(value.clone()) for value in values]
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    for weights in (together, *[[weight] for weight in alone]):
        optimizer = Muon(weights, lr=0.1)
        for weight in weights:
            weight.grad = gradients[[w.data_ptr() for w in [*together, *alone]].index(weight.data_ptr()) % len(shapes)]
        optimizer.step()
    for first, second, value in zip(together, alone, values, strict=True):
        torch.testing.assert_close(first, second)
        assert not torch.equal(first, value)


def test_padding_changes_no_loss(tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> None:
    model = build(tiny_config(tokenizer, hidden_size=16), seed=0).double()
    rows = [encode(tokenizer, conversation) for conversation in conversations[:3]]
    apart = [(batch_loss(model, [row]), sum(row.trained)) for row in rows]
    expected = sum(loss * n for loss, n in apart) / sum(n for _, n in apart)
    torch.testing.assert_close(batch_loss(model, rows), expected, rtol=1e-12, atol=0)


@pytest.fixture(scope="module")
def rows(tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]) -> list[Row]:
    return [encode(tokenizer, conversation) for conversation in conversations]


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_a_seed_gives_the_same_weights(
    tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plan = Plan(steps=40, seed=1)
        stages = [Stage(rows[:100], 0.5), Stage(rows[100:], 0.5)]
        models = [build(tiny_config(tokenizer, hidden_size=32), seed=1) for _ in range(2)]
        losses = [pretrain(model, stages, plan) for model in models]
    finally:
        torch.set_num_threads(threads)
    assert losses[0] == losses[1]
    assert len(losses[0]) == plan.steps
    assert sum(losses[0][-5:]) < 0.6 * sum(losses[0][:5])
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_saved_model_is_loaded_as_it_was(tokenizer: PreTrainedTokenizerFast, tmp_path, conversations) -> None:
    model = build(tiny_config(tokenizer, hidden_size=16), seed=0)
    save(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    row = encode(tokenizer, conversations[0])
    assert encode(again, conversations[0]) == row
    assert (again.eos_token, again.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    ids = torch.tensor([row.ids])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.tie_word_embeddings is False
