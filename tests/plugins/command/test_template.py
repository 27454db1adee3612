"""Command lines: whatever a task says is one argument, and what cannot be meant is refused by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ConfigError, DataError
from lightning.types import LLM, Task
from lightning_command.template import LONGEST_ARGUMENT, arguments_of, fill, values_of, words_of

LLM_ = LLM("http://gateway/v1", "key", "policy")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


def filled(command: str | list[str], task: Task) -> list[str]:
    values = values_of(task, LLM_, "policy:me", "/scratch", "/home/project")
    words = words_of(command)
    return [words[0], *arguments_of(words, values)]


@given(TEXT, TEXT)
def test_what_a_task_says_is_one_argument_as_it_is(said: str, more: str) -> None:
    task = Task(said, metadata={"repo": {"name": more}})
    line = "prog -p -- {task.input} --name={task.metadata.repo.name} '{{}} {task.input}' {llm.model}"
    assert filled(line, task) == ["prog", "-p", "--", said, f"--name={more}", f"{{}} {said}", "policy:me"]


def test_what_is_no_text_is_json() -> None:
    task = Task({"question": "ä", "n": 2})
    assert filled(["p", "{task.input}", "{task.input.n}"], task) == ["p", '{"question": "ä", "n": 2}', "2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "prog {taks.input}",
            r"'{taks.input}', which is no field; did you mean 'task.input'\? There are: {task.input}, {task.id}",
        ),
        ("prog {task.expected}", r"which is no field.*There are"),
        ("prog '{\"a\": 1}'", r"a brace that is meant is written twice"),
        ("prog } x", r"'}', which is no field"),
        ("{task.input} x", r"the program '{task.input}' has a field in its name"),
        ("prog {task.input} | tee log", r"has '\|', and no shell runs it"),
        ("sh -c 'echo {task.input}'", r"{task.input} stands in the script of sh -c.*\"\$1\""),
        ("/bin/bash -ec 'echo {task.metadata.x}'", r"stands in the script of /bin/bash -ec"),
        ("prog 'x", r"cannot be cut into arguments: No closing quotation"),
        ("", r"names no program"),
        ([], r"names no program"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_before_any_rollout(command: str | list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(said, re.IGNORECASE | re.DOTALL)):
        words_of(command)


def test_a_task_without_a_key_names_those_there_are() -> None:
    values = values_of(Task("x", metadata={"repo": "a", "base": "b"}), LLM_, "m", "/f", "/p")
    with pytest.raises(DataError, match=r"no {task.metadata.repository}: the keys of task.metadata are base, repo"):
        fill("{task.metadata.repository}", values)
    with pytest.raises(DataError, match=r"no {task.input.deep}: the keys of task.input are none: it is 'x'"):
        fill("{task.input.deep}", values)


@pytest.mark.parametrize("said", ["a\0b", "\ud800"])
def test_what_no_argument_can_have_is_named(said: str) -> None:
    with pytest.raises(DataError, match=r"{task.input} has a NUL character or half of a surrogate pair"):
        filled("p {task.input}", Task(said))


def test_what_is_too_long_for_an_argument_goes_to_standard_input() -> None:
    assert len(filled("p {task.input}", Task("x" * LONGEST_ARGUMENT))[1]) == LONGEST_ARGUMENT
    with pytest.raises(DataError, match=r"stdin='{task.input}'"):
        filled("p {task.input}", Task("x" * (LONGEST_ARGUMENT + 1)))


@pytest.mark.parametrize("said", ["--version", "-", "- a list\n- of things", "-rf /"])
@pytest.mark.parametrize("word", ["{task.input}", "{task.input}!", "{task.metadata.said}"])
def test_a_task_gives_a_program_no_option(said: str, word: str) -> None:
    """`git {task.input}` with the task `--version` earned 1.0."""
    task = Task(said, metadata={"said": said})
    values = values_of(task, LLM("http://h/v1", "k", "m"), "m", "/f", "/p")
    with pytest.raises(DataError, match=r"begins with '-', and git would take it for an option: write -- before"):
        list(arguments_of(words_of(f"git {word}"), values))
    for other in ("shred", "pythonscript"):
        with pytest.raises(DataError, match=f"begins with '-', and {other} would take it for an option"):
            list(arguments_of([other, "-c", word], values))
    filled = word.replace("{task.input}", said).replace("{task.metadata.said}", said)
    for before in (["git", "--"], ["sh", "-c", 'echo "$1"', "sh"], ["/usr/bin/python3.11", "-c", "pass"]):
        assert list(arguments_of([*before, word], values))[-1] == filled
    assert list(arguments_of(["git", f"--grep={word}"], values)) == [f"--grep={filled}"]
