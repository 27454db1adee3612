"""What an edit of a template may and may not do to its fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning_prompts.templates import edited_prompt, fields, refusal

CASES = [
    ("Write on {topic}.", "Rhyme on {topic}!", ""),
    ("Write on {topic}.", "Rhyme on {topic}, {topic}!", ""),
    ("Write on {topic}.", "Rhyme!", "lost_placeholder"),
    ("Write on {topic}.", "Rhyme on {subject}!", "lost_placeholder"),
    ("Write on {topic}.", "Rhyme on {topic} for {name}!", "invented_placeholder"),
    ("Write on {topic}.", 'Answer {topic} as {"rhyme": 1}', "not_a_template"),
    ("Write on {topic}.", 'Answer {topic} as {{"rhyme": 1}}', ""),
    ("Write on {topic}.", "Write on {topic", "not_a_template"),
    ("Write on {topic.name!r:>{width}}.", "On {topic.name!r:>{width}}", ""),
    ("Write on {topic.name!r:>{width}}.", "On {topic} ({width})", "invented_placeholder"),
    ("Write on {topic}.", "Rhyme on {topic.__class__.__init__.__globals__}!", "invented_placeholder"),
    ("Write on {topic}.", "Rhyme on {topic[0]}, {topic}!", "invented_placeholder"),
    ("Write on {topic}.", "Rhyme on {topic:>999999999}!", "invented_placeholder"),
    ("Write on {task.input}.", "Write {task.expected}.", "invented_placeholder"),
    ("Write on {topic}, {topic!r}.", "Rhyme on {topic!r}!", ""),
    ("Write on {:>3}.", "Rhyme on {}!", "lost_placeholder"),
    ('As {"a": 1} on {topic}', 'As {"b": 2}, {topic.x}', "invented_placeholder"),
    ("Write on {}.", "Rhyme on {}!", ""),
    ("Write on {}.", "Rhyme on {} and {}!", "invented_placeholder"),
    ("Write on {} and {}.", "Rhyme on {}!", "lost_placeholder"),
    ("Write well.", 'Answer as {"rhyme": 1}', ""),
    ("Write well.", "Answer {question}", "invented_placeholder"),
    ('As {"a": 1} on {topic}', 'As {"b": 2}, {topic}', ""),
    ('As {"a": 1} on {topic}', 'As {"b": 2}', "lost_placeholder"),
    ("Write well.", " Write well.\n", "unchanged"),
    ("Write well.", " \n", "empty"),
    ("Write well.", "x" * 101, "too_long"),
]


@pytest.mark.parametrize(("original", "edited", "reason"), CASES)
def test_refusal(original: str, edited: str, reason: str) -> None:
    assert refusal(original, edited, longest=100) == reason


PIECES = st.lists(
    st.sampled_from(["{a}", "{b}", "{}", "{{", "}}", "{", "}", '{"k": 1}', "word ", "{a.x!r:>3}"]), max_size=6
)


@given(PIECES.map("".join), PIECES.map("".join))
def test_what_is_let_through_can_be_filled_in_wherever_the_original_could(original: str, edited: str) -> None:
    class Anything:
        x = "x"

        def __format__(self, spec: str) -> str:
            return "v"

    def fill(template: str) -> str:
        return template.format(*[Anything()] * original.count("{}"), a=Anything(), b=Anything())

    if fields(original) and not refusal(original, edited, longest=1000):
        fill(original)
        fill(edited)
        assert set(fields(edited) or ()) <= set(fields(original) or ())


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("Here:\n<prompt>\nDo {x}.\n</prompt>", "Do {x}."),
        ("<prompt>old</prompt> no, better: <PROMPT>new</PROMPT>", "new"),
        ("Sure!\n```text\nDo {x}.\n\nWell.\n```\nGood luck", "Do {x}.\n\nWell."),
        ("```\none\n```\n```\ntwo\n```", None),
        ("Do it better.", None),
        ("", None),
        ("<prompt></prompt>", ""),
    ],
)
def test_the_template_is_found_in_the_answer(answer: str, prompt: str | None) -> None:
    assert edited_prompt(answer) == prompt
