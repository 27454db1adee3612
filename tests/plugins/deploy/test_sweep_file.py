"""Which runs a file of a sweep asks for, and what it says of a file that asks for none."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning_deploy.sweep import read_sweep

FULL = """
train = "lightning train mine:solve --model 'my model' --tasks train.jsonl"
seeds = [3, 1]

[settings]
"engine.lr" = [1e-6, 0.5]
"trainer.keep" = ["best", "last"]

[variants]
grpo = "--algorithm grpo:group_size=4"
ppo = ["--algorithm", "ppo"]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "sweep.toml"
    file.write_text(text)
    return file


def test_every_variant_with_every_value_and_seed(tmp_path: Path) -> None:
    runs = read_sweep(written(tmp_path, FULL))
    assert len(runs) == len({run.name for run in runs}) == 2 * 2 * 2 * 2
    assert runs[0].name == "grpo-lr=1e-06-keep=best-seed3"
    assert runs[0].arguments == (
        *("mine:solve", "--model", "my model", "--tasks", "train.jsonl", "--algorithm", "grpo:group_size=4"),
        *("--set", "engine.lr=1e-06", "--set", "trainer.keep=best", "--set", "trainer.seed=3"),
    )
    assert [run.seed for run in runs] == [3] * 8 + [1] * 8, "all variants are compared before a second seed begins"
    assert {run.variant for run in runs[:8]} == {run.variant for run in runs[8:]}


def test_a_file_may_have_seeds_alone(tmp_path: Path) -> None:
    (run,) = read_sweep(written(tmp_path, "train = ['a:b', '--model', 'm']"))
    assert (run.name, run.variant, run.seed) == ("run-seed0", "run", 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("train = 3", "train has the arguments"),
        ("", "train has the arguments"),
        ("train = 'a b", "not TOML"),
        ('train = "a \'b"', "cannot be cut"),
        ("train = 'a'\nsteps = 3", "has steps: a sweep knows"),
        ("train = 'a'\nseeds = []", "whole numbers"),
        ("train = 'a'\nseeds = [true]", "whole numbers"),
        ("train = 'a'\nseeds = [1, 1]", "twice"),
        ("train = 'a --out=x'", "--out=x, which is not for a sweep"),
        ("train = 'a --resume'", "--resume"),
        ("train = 'a --set trainer.seed=4'", "seeds = "),
        ("train = 'a'\n[settings]\n'engine.lr' = 3", "list of values"),
        ("train = 'a'\n[settings]\nengine.lr = [3]", 'write "engine.lr"'),
        ("train = 'a'\n[settings]\n'x' = ['a b', 'a/b']", "two variants are called x=a_b"),
        ("train = 'a'\n[variants]\nx = '--dev'", "variants.x has --dev"),
        ("train = 'a'\nseeds = [" + ",".join(map(str, range(1001))) + "]", "asks for 1001 runs"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="sweep") as caught:
        read_sweep(written(tmp_path, text))
    assert why in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the sweep"):
        read_sweep(tmp_path / "none.toml")


def test_a_name_is_one_folder(tmp_path: Path) -> None:
    (run,) = read_sweep(written(tmp_path, "train = 'a'\n[settings]\n'p' = ['../../etc/x']"))
    assert Path(run.name).name == run.name
    assert ".." not in Path(run.name).parts
