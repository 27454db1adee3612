"""The math example's readers, in exactly the layouts that the data sets have on disk, and what counts as a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.types import Task
from lightning_examples.math_autogen.tasks import number, read_calcx, read_gsm8k, split, tasks, val_tasks
from lightning_examples.word_problems import is_held_out

DATA = Path(__file__).parent / "data"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_gsm8k_is_read() -> None:
    found = read_gsm8k(DATA / "gsm8k.jsonl")
    assert [task.expected for task in found] == ["26", "1250", "-5/2"]
    assert found[0].input == "Mia has 16 eggs. She eats 3 and sells the rest for $2 each. How much does she get?"
    assert {task.metadata["source"] for task in found} == {"gsm8k"}
    assert len({task.id for task in found}) == 3


def test_calc_x_is_read_without_the_choices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = read_calcx(DATA / "calc_x.jsonl")
    assert [(task.id, task.expected) for task in found] == [
        ("gsm8k__0c1f", "13"),
        ("ape210k__00000012", "2/3"),
        ("svamp__chal-7", "6250"),
    ]
    assert found[1].input == "Minus x (3/2) times, 6.6 is 5.6. What is x?"
    assert "3 tasks; 1 rows left out" in caplog.text


@pytest.mark.parametrize("read", [read_gsm8k, read_calcx])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "has no text under"),
        ('{"question": "Why?"}', "has no text under"),
        ('{"id": 1, "question": "Why?", "result": "1", "answer": 2}', "has no text under"),
    ],
)
def test_a_bad_line_is_named(
    file: Callable[[str], Path], read: Callable[[Path], list[Task]], line: str, says: str
) -> None:
    path = file(f"\n{line}\n")
    with pytest.raises(DataError, match=f"data.jsonl, line 2 {says}"):
        read(path)


@pytest.mark.parametrize("answer", ["18", "#### ", "#### eighteen", "#### 18 dollars", "#### 1/0"])
def test_a_gsm8k_answer_must_end_in_a_number(file: Callable[[str], Path], answer: str) -> None:
    with pytest.raises(DataError, match="line 1: its answer does not end in"):
        read_gsm8k(file(json.dumps({"question": "?", "answer": answer})))


def test_a_file_is_split_by_the_questions_alone() -> None:
    both = [*tasks(30, seed=0), *val_tasks(20)]
    train, held_out = split(both[::-1])
    assert train == both[:30][::-1]
    assert held_out == both[30:][::-1]
    assert all(is_held_out(str(task.input)) for task in held_out)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-18", -18),
        ("$20", 20),
        ("-$20", -20),
        ("1,200", 1200),
        ("1_200_000.50", Fraction(2400001, 2)),
        ("2/5", Fraction(2, 5)),
        (".5", Fraction(1, 2)),
    ],
)
def test_numbers(text: str, value: Fraction) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    "text", ["", "-", "$", "A", "1,2", "1,2345", "12,34,567", "1e3", "1/0", "1.5/2", "1/2/3", "18 ", "٣", "nan", "1."]
)
def test_no_numbers(text: str) -> None:
    assert number(text) is None


@given(st.integers())
def test_a_whole_number_is_read_however_it_is_grouped(value: int) -> None:
    for text in (str(value), f"{value:,}", f"{value:_}"):
        assert number(text) == value


@given(st.fractions())
def test_every_fraction_is_read_as_a_reader_writes_it(value: Fraction) -> None:
    assert number(str(value)) == value


@given(st.text())
def test_any_text_is_a_number_or_none(text: str) -> None:
    value = number(text)
    assert value is None or Fraction(text.translate(str.maketrans("", "", "$,_"))) == value
