"""What commands print for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.cli.output import print_json
from lightning.types import Status, StepRecord


@pytest.mark.parametrize("odd", [2**70, "lone \ud800"])
def test_json_is_the_same_whoever_writes_it(odd: object, capsys: pytest.CaptureFixture[str]) -> None:
    """orjson writes neither long integers nor lone surrogates, and the standard library writes NaN, which is no JSON."""
    step = StepRecord("run", 0, 1, (("r", 1),), ("a", "b"), "c", metrics={"loss": float("nan")})
    values = {"steps": [step], "seen": {2, 1}, "status": Status.FAILED, "none": float("inf"), "at": Path("a/b")}
    print_json(values)
    usual = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert usual["steps"][0]["metrics"] == {"loss": None}
    print_json({**values, "odd": odd})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {**usual, "odd": odd}
