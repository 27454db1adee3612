"""Words of other libraries are answered with the word here, which exists, wherever they are given."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import lightning
import numpy as np
import pytest
from lightning.algorithms.presets import LowLevel
from lightning.config import Config, EngineConfig, load_config, with_settings
from lightning.config.fields import find
from lightning.config.other_words import WORDS, answer
from lightning.credit import Decayed, Discounted
from lightning.errors import ConfigError
from lightning.losses.correction import Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from pydantic import ValidationError

GIVEN = {"model", "agent", "tasks", "held_out"}
"""The reader's own variables."""


def named(function: ast.expr) -> Callable[..., object]:
    """The function or class that a call of an answer names."""
    names = ast.unparse(function).removeprefix("lightning.").split(".")
    found: object = lightning
    for name in names:
        found = getattr(found, name)
    assert callable(found)
    return found


@pytest.mark.parametrize("text", sorted({word.answer for word in WORDS.values()}))
def test_every_answer_is_python_that_names_what_exists(text: str) -> None:
    (statement,) = ast.parse(text).body
    if isinstance(statement, ast.Assign):
        key, value = ast.unparse(statement.targets[0]), ast.literal_eval(statement.value)
        assert find(key) is not None
        with_settings(Config(), {key: value})  # which raises for a value that the setting does not accept
        return
    assert isinstance(statement, ast.Expr)
    for call in (each for each in ast.walk(statement) if isinstance(each, ast.Call)):
        function = named(call.func)
        assert {each.arg for each in call.keywords} <= set(inspect.signature(function).parameters)
        for argument in call.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                assert argument.value in {*get_args(LowLevel), *plugins().names("algorithms")}
        if function is lightning.LightningRL:
            eval(ast.unparse(call), {"LightningRL": lightning.LightningRL})
    free = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
    assert free <= GIVEN | {"Trainer", "LightningRL", "lightning"}


def _model(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


ALGORITHM: Any = lightning.LightningRL
TRAINER: Any = lightning.Trainer
DPO: Any = lightning.DPO
SFT: Any = lightning.SFT
DISTILL: Any = lightning.Distill
CORRECTION: Any = Correction
LOSS: Any = ClippedPolicyGradient
DECAYED: Any = Decayed
SECTION: Any = EngineConfig
CONFIG: Any = Config
ASKED = [
    (lambda model: ALGORITHM(beta=0.1), "beta", "LightningRL(kl_coefficient=0.04)"),
    (lambda model: TRAINER(model, beta=0.1), "beta", "grpo:kl_coefficient=0.04"),
    (lambda model: TRAINER(model, "grpo:beta=0.1"), "beta", "LightningRL(kl_coefficient=0.04)"),
    (lambda model: TRAINER(model, config={"learning_rate": 1.0}), "learning_rate", "--set engine.lr=1e-6"),
    (lambda model: load_config(overrides=["engine.beta=1"]), "beta", "LightningRL(kl_coefficient=0.04)"),
    (lambda model: load_config(overrides=["actor_rollout_ref.rollout.n=1"]), "rollout.n", "LightningRL(group_size=8)"),
    (lambda model: load_config(overrides=["actor_rollout_ref.new=1"]), "actor_rollout_ref", "Trainer(model"),
    (lambda model: load_config(_toml(model, "[algorithm]\nkl_coef = 1")), "kl_coef", "grpo:kl_coefficient=0.001"),
]


def _toml(folder: Path, text: str) -> Path:
    file = folder / "settings.toml"
    file.write_text(text)
    return file


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: ALGORITHM(credit=Decayed), r"the credit is the class Decayed, .* give Decayed\(\.\.\.\)"),
    (lambda: ALGORITHM("grpo", 8), "LightningRL: too many positional arguments. It takes: low_level, group_size"),
    (lambda: ALGORITHM(group_size=8.5), "LightningRL: group_size cannot be 8.5; it accepts a whole number"),
    (lambda: ALGORITHM("GRPO"), "did you mean 'grpo'"),
    (lambda: TRAINER(), "Trainer: missing a required argument: 'model'"),
    (lambda: TRAINER(["a", "b"]), r"the model is \['a', 'b'\], neither a folder"),
    (lambda: TRAINER("m", lr="1e-6"), "Trainer: lr cannot be '1e-6'; it accepts a number, or None"),
    (lambda: DPO(num_generations=4), r"number of rollouts of a task in a step. Here: `DPO\(group_size=8\)`"),
    (lambda: DPO(beta="x"), "DPO: beta cannot be 'x'; it accepts a number"),
    (lambda: SFT(learning_rate=1e-5), "--set engine.lr=1e-6"),
    (lambda: DISTILL("m", kl_coef=0.1), "verl's word for the weight of the KL term"),
    (lambda: CORRECTION(clip=2.0), "Correction has no argument 'clip'. It takes: kind, level"),
    (
        lambda: LOSS(beta=0.1),
        r"ClippedPolicyGradient has no argument 'beta': .* `ClippedPolicyGradient\(kl_coefficient=",
    ),
    (lambda: DECAYED(gama=0.5), "Decayed has no argument 'gama'; did you mean 'gamma'"),
    (lambda: DECAYED(gamma="x"), "Decayed: gamma cannot be 'x'; it accepts a number"),
    (lambda: SECTION(learning_rate=1e-6), "EngineConfig has no argument 'learning_rate'.*engine.lr"),
    (lambda: CONFIG(beta=1), r"Config has no argument 'beta'.*LightningRL\(kl_coefficient=0.04\)"),
]


@pytest.mark.parametrize(("ask", "said"), REFUSED)
def test_what_a_noun_does_not_take_is_an_error_of_ours(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask()


def test_no_registered_credit_or_algorithm_takes_what_it_does_not_know() -> None:
    """Each refuses it by itself (`refuses_unknown`): they are made by users before any registry sees them."""
    made = {type(plugins().credit(name)) for name in plugins().names("credits")}
    made |= {type(plugins().get("algorithms", name)()) for name in plugins().names("algorithms") if name != "distill"}
    nouns: list[Any] = [kind for kind in made if is_dataclass(kind)]
    assert {Decayed, Discounted, lightning.LightningRL, lightning.DPO} <= {*nouns}
    for noun in nouns:
        with pytest.raises(ConfigError, match=f"{noun.__name__} has no argument 'no_such'"):
            noun(no_such=1)


def test_what_a_noun_takes_is_taken() -> None:
    assert ALGORITHM("dapo", clip_low=np.float32(0.5), group_size=np.int64(4)).group_size == 4
    assert SFT(best=None, threshold=1).threshold == 1
    assert SECTION(lr=None).lr is None
    with pytest.raises(ValidationError, match="greater than 0"):
        SECTION(lr=-1.0)


@pytest.mark.parametrize(("ask", "word", "said"), ASKED)
def test_a_word_of_another_library_is_answered_wherever_it_is_given(
    ask: Callable[[Path], object], word: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        ask(_model(tmp_path))
    assert f"`{word}` is {WORDS[word].whose}'s word for {WORDS[word].meaning}. Here: " in str(raised.value)
    assert said in str(raised.value)
    assert "did you mean" not in str(raised.value)


def test_other_mistakes_are_clear_errors(tmp_path: Path) -> None:
    class Mine:
        def __call__(self, group: object, advantage: object) -> list[object]:
            return []

    model = _model(tmp_path)
    wrong = {
        "LightningRL has no argument 'gruop_size'; did you mean 'group_size'? It takes: low_level, group_size": lambda: (
            ALGORITHM(gruop_size=8)
        ),
        "Trainer has no argument 'max_staleness'; did you mean 'trainer.max_staleness'": lambda: TRAINER(
            model, max_staleness=2
        ),
        "the credit is the class Mine, not an object of it: give Mine(...)": lambda: ALGORITHM(credit=Mine),
        "A run trains one model; its agent and its tasks are given to": lambda: TRAINER(["a", "b"]),
        "config is 3: give settings by name": lambda: TRAINER(model, config=3),
    }
    for said, ask in wrong.items():
        with pytest.raises(ConfigError) as raised:
            ask()
        assert said in str(raised.value)


def test_no_answer_is_given_to_words_of_our_own() -> None:
    assert not [name for name in WORDS if find(name)]
    assert answer("trainer.stops") == ""
    assert len(WORDS) >= 40


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gatway.override_sampling.temperature=1.0", "gateway.override_sampling.temperature"),
        ("gateway.overide_sampling.top_p=1.0", "gateway.override_sampling.top_p"),
    ],
)
def test_a_misspelled_section_is_not_taken_for_a_word_of_another_library(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=[given])
    assert str(raised.value).endswith(f"; did you mean {meant!r}?")
