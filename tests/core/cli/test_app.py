"""The command line as a whole."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightning.cli import app, doctor
from lightning.errors import ConfigError
from lightning.installation import install_command
from lightning.plugins import Plugins, plugins


def test_version(lightning) -> None:
    from lightning import __version__

    ran = lightning("--version")
    assert (ran.code, ran.out) == (0, f"lightning {__version__}\n")


@pytest.mark.parametrize("name", sorted({*app.COMMANDS, *plugins().names("commands")}))
def test_every_command_has_help(lightning, name: str) -> None:
    ran = lightning(name, "--help")
    assert ran.code == 0
    assert f"Usage: lightning {name}" in ran.out


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(lightning) -> None:
    ran = lightning("docter")
    assert ran.code == 2
    assert "doctor" in ran.err


GREETER = """
import lightning

@lightning.hookimpl
def register_commands(register):
    register("greet", make)

def make():
    \"\"\"Say hello.

    To somebody.
    \"\"\"
    from greeting import greet
    return greet
"""


@pytest.fixture
def own_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process' plugins are looked for anew."""
    found = Plugins()
    monkeypatch.setattr(app, "plugins", lambda: found)


@pytest.mark.usefixtures("own_plugins")
def test_a_plugins_command_is_in_the_help_and_imported_when_it_is_typed(lightning, install) -> None:
    modules = {"greeter": GREETER, "greeting": "def greet(name: str) -> None:\n    print('hello', name)\n"}
    install("greeter", {"greeter": "greeter"}, modules)
    assert re.search(r"greet +Say hello\.", lightning("--help").out)
    assert "greeting" not in sys.modules
    assert lightning("greet", "Ann").out == "hello Ann\n"


@pytest.mark.usefixtures("own_plugins")
def test_two_plugins_with_one_command_are_both_named(lightning, install) -> None:
    for name in ("one", "other"):
        install(name, {name: name}, {name: GREETER})
    ran = lightning("greet", "Ann")
    assert ran.code == 2
    assert "two plugins register the command 'greet': 'one' (one 1.0) and 'other' (other 1.0)" in ran.err
    ran = lightning("--help")
    assert (ran.code, "greet" in ran.out, "doctor" in ran.out) == (0, False, True)


@pytest.mark.usefixtures("own_plugins")
def test_a_plugins_command_never_takes_the_place_of_lightnings_own(lightning, install, caplog) -> None:
    install("greeter", {"greeter": "greeter"}, {"greeter": GREETER.replace('"greet"', '"doctor"')})
    assert "Say hello" not in lightning("--help").out
    assert "a plugin registers the command 'doctor', which is lightning's own" in caplog.text


@pytest.mark.usefixtures("own_plugins")
def test_a_command_whose_plugin_is_away_says_what_brings_it(lightning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "planner")
    ran = lightning("plan", "runs/x")
    assert ran.code == 2
    assert "there is no command 'plan'" in ran.err
    assert re.search(r"The plugin 'planner' .*, which might have it, is disabled", ran.err)
    assert f"The plugin 'planner' brings it. Run: {install_command('planner')}" in " ".join(ran.err.split())


CHECKER = """
import lightning
from lightning.cli.check import Check

def check(tried):
    if tried == "fail":
        raise OSError("it burns")
    yield Check("oven", "ok" if tried is None else "low", f"tried {tried!r}")

@lightning.hookimpl
def register_checks(register):
    register("oven", check)
"""


def findings(lightning, *arguments: str) -> dict[str, dict[str, str]]:
    return {found["name"]: found for found in json.loads(lightning("doctor", "--json", *arguments).out)["checks"]}


@pytest.fixture
def own_doctor(own_plugins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "plugins", app.plugins)


@pytest.mark.usefixtures("own_doctor")
def test_a_plugins_check_is_told_what_to_try(lightning, install) -> None:
    install("oven", {"oven": "oven_plugin"}, {"oven_plugin": CHECKER})
    assert findings(lightning)["oven"]["detail"] == "tried None"
    assert findings(lightning, "--try", "oven")["oven"]["detail"] == "tried ''"
    assert findings(lightning, "--try", "oven=a=b")["oven"]["detail"] == "tried 'a=b'"
    broken = findings(lightning, "--try", "oven=fail")
    assert (broken["oven"]["status"], "it burns" in broken["oven"]["detail"]) == ("broken", True)
    assert "disk" in broken, "the others are told"


@pytest.mark.usefixtures("own_doctor")
def test_what_nobody_can_try_is_refused_with_the_reason(lightning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "verl")
    ran = lightning("doctor", "--try", "verl")
    assert ran.code == 2
    assert re.search(r"The plugin 'verl' .*, which might have it, is disabled", ran.err)


@pytest.fixture
def failing(install, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from lightning.errors import ConfigError\ndef failing():\n    raise ConfigError('the [thing] is wrong: do this')"
    install("failing", modules={"failing_command": source})
    monkeypatch.setattr(app, "COMMANDS", {"failing": app.CoreCommand("failing_command", "Fails.")})


@pytest.mark.usefixtures("failing")
def test_an_error_is_one_line_and_exit_code_2(lightning) -> None:
    ran = lightning("failing")
    assert (ran.code, ran.out, ran.err) == (2, "", "error: the [thing] is wrong: do this\n")


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("arguments", [("--debug", "failing"), ("failing", "--debug")])
def test_debug_shows_the_traceback(lightning, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        lightning(*arguments)


@pytest.fixture
def warning(install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that logs at two levels."""
    source = (
        "import logging\ndef warning():\n    logger = logging.getLogger('lightning.made_up')\n"
        "    logger.info('a detail')\n    logger.warning('look here')\n"
    )
    install("warning", modules={"warning_command": source})
    monkeypatch.setattr(app, "COMMANDS", {"warning": app.CoreCommand("warning_command", "Warns.")})


@contextmanager
def no_handlers() -> Iterator[None]:
    """Logging as it is in a new process; pytest has handlers of its own."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.mark.usefixtures("warning")
@pytest.mark.parametrize(
    ("arguments", "logged"),
    [
        (("warning",), ["WARNING lightning.made_up: look here"]),
        (("--log-level", "error", "warning"), []),
        (
            ("warning", "--log-level=info"),
            ["INFO lightning.made_up: a detail", "WARNING lightning.made_up: look here"],
        ),
    ],
)
def test_log_lines_have_a_time_and_begin_at_the_level_asked_for(
    lightning, arguments: tuple[str, ...], logged: list[str]
) -> None:
    with no_handlers():
        lines = [line.partition(" ") for line in lightning(*arguments).err.splitlines()]
    assert [line for _, _, line in lines] == logged
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", time) for time, _, _ in lines)


@pytest.mark.parametrize("arguments", [("--log-level", "loud", "doctor"), ("doctor", "--log-level")])
def test_a_level_that_there_is_not_is_an_error(lightning, arguments: tuple[str, ...]) -> None:
    ran = lightning(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "there is no such level; give one of debug, info, warning, error" in ran.err


def test_help_imports_none_of_the_commands() -> None:
    code = (
        "import sys\nfrom lightning.cli.app import build\nbuild()\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'pydantic', 'starlette', 'lightning.trainer'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_module_is_a_command_too() -> None:
    ran = subprocess.run([sys.executable, "-m", "lightning", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("lightning 0.")


def test_threads_that_wait_sleep_unless_the_environment_says_otherwise(
    lightning, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        lightning("--version")
        assert os.environ["OMP_WAIT_POLICY"] == expected


def test_train_refuses_an_argument_that_the_algorithm_does_not_take(lightning, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tasks.jsonl").write_text('{"input": "1 + 1"}\n')
    options = (
        "train",
        "--model",
        str(tmp_path),
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
        "--out",
        str(tmp_path / "run"),
    )
    ran = lightning(*options, "--runner", "remote", "--algorithm", "grpo:grop_size=8")
    assert ran.code == 2
    assert "grpo has no argument 'grop_size'; did you mean 'group_size'? It takes: " in ran.err
    assert "kl_coefficient (a number)" in ran.err
    assert not (tmp_path / "run").exists()


def test_a_start_checks_what_costs_nothing_before_the_model_is_fetched(
    lightning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, agent, tasks, held-out tasks, folder; then the model, and vLLM last."""
    fetched: list[str] = []

    def fetch(model: str) -> Path:
        fetched.append(model)
        raise ConfigError("the hub did not give it")

    monkeypatch.setattr("lightning.trainer.trainer.resolve_model", fetch)
    (tmp_path / "tasks.jsonl").write_text('{"input": "one"}\n')
    (tmp_path / "file").write_text("")
    right = {
        "--set": "trainer.steps=1",
        "agent": "operator:add",
        "--tasks": str(tmp_path / "tasks.jsonl"),
        "--val": str(tmp_path / "tasks.jsonl"),
        "--out": str(tmp_path / "run"),
    }
    wrong = {
        "--set": ("trainer.stops=1", "unknown setting 'trainer.stops'"),
        "agent": ("no_such_module:agent", "no_such_module"),
        "--tasks": (str(tmp_path / "tasks"), "cannot read tasks"),
        "--val": (str(tmp_path / "held out"), "cannot read tasks.*held out"),
        "--out": (str(tmp_path / "file" / "run"), "cannot write to the run's folder"),
    }

    def said(given: dict[str, str]) -> str:
        options = [part for name, value in given.items() if name != "agent" for part in (name, value)]
        ran = lightning("train", given["agent"], "--model", "an-org/a-model", *options)
        assert ran.code
        return " ".join(ran.err.split())

    given = {name: value for name, (value, _) in wrong.items()}
    for name, (_, message) in wrong.items():
        assert re.search(message, said(given)), f"{name} is told first of what is still wrong"
        given[name] = right[name]
    assert fetched == []
    assert "the hub did not give it" in said(given)
    assert fetched == ["an-org/a-model"]
