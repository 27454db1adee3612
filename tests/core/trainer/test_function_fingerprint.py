"""What a run's record says of functions and objects: the same in every process, another once they were edited."""

from __future__ import annotations

import functools
import importlib.util
import json
import linecache
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from lightning.trainer.runs import holds_code, recorded
from lightning.types import Json

SOURCE = """
from dataclasses import dataclass
from functools import partial, wraps

def plain(group, advantage, gamma=0.5):
    return gamma

def maker():
    def plain(group, advantage, gamma=0.5):
        return gamma
    return plain

class Called:
    def __init__(self, state=0):
        self.state = state
    def __call__(self, group, advantage):
        return 1.0
    def method(self, group):
        return 2.0

@dataclass(frozen=True)
class Fields:
    gamma: float = 0.5
    inner: object = plain
    def __call__(self, group, advantage):
        return self.gamma

one, two = lambda group: 1.0, lambda group: 2.0
nested = lambda group: (lambda inner: inner)
lines = dict(credit=lambda group: [
    group,
], steps=10)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of this source, as another process would import it."""

    def load(source: str = SOURCE) -> ModuleType:
        path = tmp_path / "own_code.py"
        path.write_text(source)
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("own_code", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own_code", module)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return load


def said(value: object) -> Json:
    found: Json = json.loads(json.dumps(value, default=recorded))
    return found


def edition(value: object) -> object:
    found = said(value)
    assert isinstance(found, dict)
    return found["sha256"]


def test_a_function_is_told_by_its_name_and_source(load) -> None:
    module = load()
    found = said(module.plain)
    assert isinstance(found, dict)
    assert found["function"] == "own_code.plain"
    assert holds_code({"credit": found})
    assert edition(module.maker()) == found["sha256"], "where it is indented is no matter"
    assert edition(load("# a line above\n" + SOURCE).plain) == found["sha256"]
    assert edition(load(SOURCE.replace("return gamma\n\ndef", "return 2 * gamma\n\ndef")).plain) != found["sha256"]
    assert edition(load(SOURCE.replace("gamma=0.5", "gamma=0.75")).plain) != found["sha256"]


@pytest.mark.parametrize("name", ["one", "two", "nested", "lines"])
def test_a_lambda_is_told_by_itself_and_not_by_its_line(load, name: str) -> None:
    def edited(source: str) -> object:
        module = load(source)
        return edition(module.lines["credit"] if name == "lines" else getattr(module, name))

    before = edited(SOURCE)
    assert (
        edited(SOURCE.replace("steps=10", "steps=20, resume=True").replace("one, two =", "first = one, two ="))
        == before
    )
    changes = {"one": ("1.0, lam", "3.0, lam"), "two": ("2.0\nnested", "3.0\nnested"), "nested": ("r: inner", "r: 1")}
    assert edited(SOURCE.replace(*changes.get(name, ("    group,", "    group[0],")))) != before


def test_the_lambdas_of_a_line_are_told_apart(load) -> None:
    module = load()
    assert len({edition(module.one), edition(module.two), edition(module.nested), edition(module.nested(0))}) == 4


def test_without_a_source_the_bytecode_tells() -> None:
    def typed(source: str) -> object:
        space: dict[str, object] = {"__name__": "typed"}
        exec(source, space)
        return space["mine"]

    text = "def mine(group):\n    return [word in {'a', 'b', 'c'} for word in group.words] + [lambda: 1.0]"
    assert edition(typed(text)) == edition(typed(text))
    for before, after in (("1.0", "2.0"), ("group.words", "group.names"), ("'c'", "'d'"), ("[word in", "[word not in")):
        assert edition(typed(text)) != edition(typed(text.replace(before, after)))


def test_what_is_built_in_has_only_a_name() -> None:
    assert said(sorted) == {"function": "builtins.sorted"}
    assert said(np.add) == {"object": "numpy.ufunc"}
    assert said(object()) == {"object": "builtins.object"}


def test_a_value_that_json_has_no_word_for_is_told_by_its_repr() -> None:
    half = said({"credit": np.float32(0.5), "group_size": np.int64(4), "flag": np.bool_(True)})
    assert half == {"credit": 0.5, "group_size": 4, "flag": True}
    assert not holds_code(half)
    assert said(Decimal("0.1")) == {"object": "decimal.Decimal", "repr": "Decimal('0.1')"}
    assert said(np.longdouble(0.5)) != said(np.longdouble(0.25))
    assert said(np.datetime64("2020-01-01")) == {"object": "datetime.date", "repr": "datetime.date(2020, 1, 1)"}
    words = [f"word {number}" for number in range(9)]
    in_order = "{" + ", ".join(map(repr, words)) + "}"
    assert said(set(words)) == {"object": "builtins.set", "repr": in_order}, "in every process"


def test_objects_methods_and_partials_are_told_by_their_parts(load) -> None:
    module = load()
    bound = said(functools.partial(module.plain, 1, gamma=0.25))
    assert bound == {"partial": said(module.plain), "args": [1], "keywords": {"gamma": 0.25}}
    assert said(module.Called().method) == {
        "function": "own_code.Called.method",
        "sha256": edition(module.Called.method),
    }
    called = said(module.Called(1))
    assert called == {"object": "own_code.Called", "sha256": edition(module.Called)} == said(module.Called(2))
    fields = said(module.Fields(0.25))
    assert fields == {
        "type": "own_code.Fields", "gamma": 0.25, "inner": said(module.plain), "sha256": edition(module.Fields),
    }  # fmt: skip
    assert holds_code(bound)
    assert holds_code([fields])
    again = load(SOURCE.replace("return 1.0", "return 3.0").replace("return self.gamma", "return 0.0"))
    assert said(again.Called()) != called
    assert edition(again.Fields()) != fields["sha256"]


@dataclass(frozen=True)
class Settings:
    model: str = "m"


def test_a_dataclass_that_is_not_called_and_one_of_ours_have_no_edition() -> None:
    from lightning.credit import Decayed

    assert said(Settings()) == {"type": f"{__name__}.Settings", "model": "m"}
    ours = said(Decayed())
    assert isinstance(ours, dict)
    assert str(ours["type"]).endswith(".Decayed")
    assert "sha256" not in ours
    assert not holds_code(ours)
    assert not holds_code({"error": -0.1, "function": 0.5})
