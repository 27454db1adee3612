"""Algorithms as text: what was written is what is read, and what an algorithm does not take is refused with what it takes."""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms import Batch, Intake, from_batch, from_loss
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.spec import Phase, make_algorithm, parse_algorithms
from lightning.batch.trajectory import Group
from lightning.config.fields import toml_value
from lightning.errors import ConfigError, PluginError
from lightning.plugins import plugins
from lightning.trainer import Trainer
from lightning.trainer.algorithm import resolve_algorithm

NAMES = st.text(string.ascii_letters + string.digits + "_+-.", min_size=1, max_size=12)
KEYS = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
WORDS = st.text(string.ascii_letters + " ,:=[]{}'#-", max_size=12)
PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6).filter(lambda x: x == x) | WORDS
VALUES = PLAIN.filter(lambda value: value is not None) | st.lists(st.integers(-9, 9), max_size=3) | st.none()
PHASES = st.builds(Phase, NAMES, st.dictionaries(KEYS, VALUES, max_size=3), st.none() | st.integers(1, 10**6))


def written(phase: Phase) -> str:
    """A phase as a user would write it."""
    steps = [] if phase.steps is None else [str(phase.steps)]
    arguments = ",".join(f"{key}={toml_value(value)}" for key, value in phase.arguments.items())
    return ":".join([phase.name, *steps, *([arguments] if arguments else [])])


@given(st.lists(PHASES, min_size=1, max_size=4))
def test_what_was_written_is_what_is_read(phases: list[Phase]) -> None:
    assert parse_algorithms(",".join(map(written, phases))) == phases
    assert parse_algorithms(" , ".join(map(written, phases))) == phases


def test_both_forms_of_the_shell_are_told_apart() -> None:
    assert parse_algorithms("sft:2,grpo:20") == [Phase("sft", {}, 2), Phase("grpo", {}, 20)]
    assert parse_algorithms("grpo:group_size=8,kl_coefficient=0.01") == [
        Phase("grpo", {"group_size": 8, "kl_coefficient": 0.01})
    ]
    assert parse_algorithms("sft:2:best=1,threshold=null,reinforce++:credit=leave-one-out,dapo:5") == [
        Phase("sft", {"best": 1, "threshold": None}, 2),
        Phase("reinforce++", {"credit": "leave-one-out"}),
        Phase("dapo", {}, 5),
    ]
    assert parse_algorithms("x:a.b=1,a.c=two")[0].arguments == {"a": {"b": 1, "c": "two"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a part of it is empty"),
        ("grpo,", "a part of it is empty"),
        ("group_size=8", "belongs to no algorithm"),
        ("grpo:", "'' is neither a number of steps"),
        ("grpo:0", "'0' is neither a number of steps"),
        ("grpo:many", "'many' is neither a number of steps"),
        ("grpo:2:3", "is no algorithm"),
        ("gr po:2", "is no algorithm"),
        ("grpo:a=1,a=2", "a is given twice"),
        ("grpo:a=1,a.b=2", "a is given as a whole and as a.b"),
        ("grpo:=1", "'' is no name of an argument"),
        ("grpo:a=[1", "is not a TOML value"),
    ],
)
def test_what_is_no_list_of_phases_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_algorithms(text)
    assert said in str(raised.value)


def test_arguments_reach_the_algorithm(tmp_path: Path) -> None:
    text = "grpo:group_size=4,kl_coefficient=1,kl_estimator=k3,credit=decayed,tool_reward={error = -0.1, ok = 0.5}"
    expected = LightningRL(
        group_size=4,
        kl_coefficient=1.0,
        kl_estimator="k3",
        credit="decayed",
        tool_reward={"error": -0.1, "ok": 0.5},
    )
    assert resolve_algorithm(text) == expected
    (tmp_path / "config.json").write_text("{}")
    assert Trainer(tmp_path, text, out=tmp_path / "run").algorithm == expected
    assert resolve_algorithm("sft:best=null,threshold=0.5").name == "sft"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpo:grop_size=8", "grpo has no argument 'grop_size'; did you mean 'group_size'? It takes: "),
        ("grpo:grop_size=8", "group_size (an integer)"),
        ("grpo:group_size=eight", 'grpo: group_size cannot be "eight"; it accepts an integer'),
        ("grpo:group_size=8.5", "grpo: group_size cannot be 8.5; it accepts an integer"),
        ("grpo:group_size=true", "grpo: group_size cannot be true; it accepts an integer"),
        ("grpo:group_size=null", "grpo: group_size cannot be null; it accepts an integer"),
        ("grpo:kl_estimator=k4", 'grpo: kl_estimator cannot be "k4"; it accepts "k1" or "k2" or "k3"'),
        ("grpo:group_size=1", "group_size=1"),
        ("sft:2,grpo:20", "is a schedule"),
    ],
)
def test_what_an_algorithm_does_not_take_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_algorithm(text)
    assert said in str(raised.value)
    with pytest.raises(PluginError, match="did you mean 'grpo'"):
        resolve_algorithm("grop:group_size=8")


@dataclass(frozen=True)
class Bounds:
    low: float = 0.5
    kind: str = "mask"


@dataclass(frozen=True)
class Strangers(LightningRL):
    """As a plugin's own: fields of its own, one of which has fields itself."""

    bounds: Bounds = field(default_factory=Bounds)
    names: tuple[str, ...] = ()


@from_loss
def plain(tokens):  # type: ignore[no-untyped-def]
    return -tokens.advantages * tokens.logprobs


@from_batch
def bare(groups, *, bar=1, size: int = 3):  # type: ignore[no-untyped-def]
    return Batch((), ())


@from_batch
def typed(groups: Sequence[Group], *, group_size: int = 4, bar: float = 0.5) -> Batch:
    return Intake().batch([], [])


def test_a_plugins_algorithms_take_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"strangers": Strangers, "plain": partial(plain, low_level="rloo"), "bare": bare, "typed": typed}
    monkeypatch.setattr(type(plugins()), "algorithm", lambda self, name: known[name])

    def made(text: str) -> object:
        return make_algorithm(parse_algorithms(text)[0])

    assert made("strangers:bounds.low=1,names=['a','b'],group_size=2") == Strangers(
        bounds=Bounds(low=1.0), names=("a", "b"), group_size=2
    )
    assert made("plain:group_size=2") == plain("rloo", group_size=2)
    assert vars(made("bare:bar=0.5,size=2")) == {"bar": 0.5, "size": 2, "group_size": 8}
    assert vars(made("typed:bar=1")) == {"bar": 1.0, "group_size": 4}
    for text, said in (
        ("strangers:bounds.knd=1", "bounds has no argument 'knd'; did you mean 'kind'? It takes: low (a number), kind"),
        ("strangers:bounds=1", "bounds cannot be 1; it accepts a table"),
        ("strangers:names=[1]", "names cannot be [1]; it accepts a list of strings"),
        ("typed:bar=high", 'typed: bar cannot be "high"; it accepts a number'),
        ("bare:size=0.5", "bare: size cannot be 0.5; it accepts an integer"),
    ):
        with pytest.raises(ConfigError) as raised:
            made(text)
        assert said in str(raised.value)


def test_an_object_that_no_text_can_say_is_named_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import lightning\n\nstyle = lightning.Judge('Short.', model='m', base_url='http://127.0.0.1:1/v1')\n"
    (tmp_path / "named_judges.py").write_text(source + "def by_tool(event): return -0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (phase,) = parse_algorithms("grpo:credit=named_judges:style,tool_reward=named_judges:by_tool")
    made: Any = make_algorithm(phase)
    assert (made.credit.rubric, made.credit.model) == ("Short.", "m")
    assert made.tool_reward(None) == -0.5
    for name, said in (("named_judges:other", "has no 'other'"), ("nowhere_at_all:style", "for the credit")):
        with pytest.raises(ConfigError, match=said):
            make_algorithm(Phase("grpo", {"credit": name}))
