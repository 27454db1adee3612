"""Why attempts failed, in a line that a person can read."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import pytest
from lightning.runner.outcomes import described
from lightning.trainer.summary import Reason, grouped
from lightning.trainer.summary import reason as reason_of


def solve(number: int) -> object:
    if number == 0:
        return json.loads("{")  # the innermost frames are the standard library's
    if number == 1:
        try:
            return {}["answer"]
        except KeyError as error:
            raise ValueError("first line\nsecond line") from error
    if number == 2:
        error = RuntimeError("no plan")
        error.add_note("During task with name 'agent' and id 'x'")
        raise error
    if number == 3:
        try:
            raise OSError("gone")
        except OSError as error:
            raise ExceptionGroup("several", [error]) from None
    raise ExceptionGroup("several", [OSError("was never raised")])


def error_of(number: int) -> str:
    try:
        solve(number)
    except Exception as error:
        return "".join(traceback.format_exception(error)).rstrip()
    raise AssertionError


FILE = Path(__file__).name


def reason(error: str) -> str:
    return str(reason_of(error))


def test_the_reason_has_its_parts_as_fields() -> None:
    found = reason_of(described("cut_off", error_of(2)))
    assert (found.cause, found.exception, found.message) == ("cut_off", "RuntimeError", "no plan")
    assert re.fullmatch(rf"{FILE}:\d+ in solve", found.place)
    assert reason_of("KeyError: a line alone") == Reason(message="KeyError: a line alone")
    too_long = reason_of("BadRequestError: This model's maximum context length is 9 tokens.")
    assert too_long.cure == "here that length is policy_server.max_model_len"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "json.decoder.JSONDecodeError: Expecting property name"),
        (1, "ValueError: first line at"),
        (2, "RuntimeError: no plan at"),
        (3, "OSError: gone at"),
        (4, "ExceptionGroup: several (1 sub-exception) at"),
    ],
)
def test_the_exception_and_the_users_own_frame(number: int, said: str) -> None:
    found = reason(error_of(number))
    assert found.startswith(said)
    assert f"at {FILE}:" in found
    assert found.endswith(" in solve")
    assert "\n" not in found


def test_what_is_no_traceback_is_its_first_line() -> None:
    assert (
        reason("the agent ran for more than 5 s and was killed\nand more")
        == "the agent ran for more than 5 s and was killed"
    )
    assert reason("") == "no reason was given"
    assert len(reason("x" * 5000)) < 400
    assert reason("max_turns (it did not end): over 5") == "max_turns (it did not end): over 5"


def test_a_fault_of_the_policys_keeps_its_cause() -> None:
    assert reason(described("cut_off", error_of(2))).startswith("cut_off: RuntimeError: no plan at ")


def test_a_prompt_that_was_too_long_names_the_setting() -> None:
    assert "policy_server.max_model_len" in reason("BadRequestError: This model's maximum context length is 9 tokens.")


def test_alike_ones_are_counted_together() -> None:
    errors = [error_of(0), "took 5 s", "took 6 s", "took 7 s"]
    (three, one) = grouped(errors)
    assert three == (3, Reason(message="took 5 s"))
    assert one[0] == 1


def test_a_frame_of_the_script_that_was_started_is_called_so() -> None:
    """cloudpickle keeps the line and leaves the file's name out."""
    error = 'Traceback (most recent call last):\n  File "<dynamic-code>", line 33, in agent\nKeyError: 1'
    assert reason(error) == "KeyError: 1 at your script:33 in agent"


def test_a_frame_of_an_adapter_in_a_checkout_is_not_the_users() -> None:
    ours = '  File "/l/adapters/dspy/lightning_dspy/methods.py", line 77, in _around'
    error = f'Traceback (most recent call last):\n  File "/my/agent.py", line 9, in agent\n{ours}\nKeyError: 1'
    assert reason(error) == "KeyError: 1 at agent.py:9 in agent"
