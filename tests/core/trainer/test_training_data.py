"""Which calls belong to the component of interest."""

from __future__ import annotations

import pytest
from lightning.trainer.training_data import is_trainable
from lightning.types import Caller

WRITER = Caller("writer", ("crew", "writer"))


@pytest.mark.parametrize(
    ("globs", "trained"),
    [
        ([], True),
        (["writer"], True),
        (["crew/*"], True),
        (["judge"], False),
        (["!judge"], True),
        (["!writer"], False),
        (["crew/*", "!writer"], False),
        (["crew/*", "!judge"], True),
        (["model:gpt-4o"], True),
        (["model:gpt-3*"], False),
        (["!model:gpt-4o"], False),
        (["!model:gpt-3*"], True),
        (["writer", "!model:gpt-4*"], False),
        (["[!j]*"], True),
    ],
)
def test_globs_are_of_the_path_the_name_and_the_model(globs: list[str], trained: bool) -> None:
    assert is_trainable(WRITER, globs, "gpt-4o") is trained
