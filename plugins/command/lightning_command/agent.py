"""`lightning.command`: a program as an agent.

The invariant: each rollout has its own folder, home and environment, all deleted when it ends. The program's exit code, its
file or the grader gives the reward; a program that fails in another way has no reward.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from lightning.errors import ConfigError, DataError, RunnerError
from lightning.runner.protocol import Reward
from lightning.types import LLM, Task

from lightning_command.environment import ALIAS, variables_of, write_settings
from lightning_command.harbor import KEY, WORK, Place, check_sandbox, read_task, verifier_environment
from lightning_command.running import CommandResult, read_reward, run
from lightning_command.template import arguments_of, check_fields, fields_of, fill, values_of, words_of

logger = logging.getLogger(__name__)

Grader: TypeAlias = Callable[[Task, CommandResult], "Reward | Awaitable[Reward]"]


class Command:
    """A program that is called as an agent; `lightning.command` makes one."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        grader: Grader | None,
        reward_file: str,
        files: str,
        stdin: str,
        env: Mapping[str, str],
        name: str,
    ) -> None:
        self.words, self.grader, self.reward_file = tuple(words), grader, reward_file
        self.files, self.stdin, self.env = files, stdin, dict(env)
        self.program = Path(words[0]).name
        self.name = name or self.program.partition(".")[0]
        self.project = os.getcwd()  # noqa: PTH109 — as it is shown in a sandbox

    def __repr__(self) -> str:
        return f"command({shlex.join(self.words)!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the agent in the process that runs it, where the program must be found."""
        self.__dict__.update(state)
        self.find()

    async def __call__(self, task: Task, llm: LLM) -> Reward:
        """Run the program on a task and return the reward. Raises `RunnerError` when there is no reward, `DataError` for a task
        that lacks a field."""
        root = Path(tempfile.mkdtemp(prefix="lightning-"))
        try:
            home = root / "home"
            home.mkdir()
            write_settings(self.program, llm, self.name, home)
            if KEY in task.metadata:
                return await self._in_place(task, llm, Place(read_task(Path(str(task.metadata[KEY]))), root))
            folder = root / "work"
            values = self._values(task, llm, str(folder))
            await asyncio.to_thread(self._fill_folder, folder, values)
            environment, stdin = self._environment(llm, home, values), fill(self.stdin, values)
            async with run(self._argv(values), environment, root, folder, stdin=stdin) as result:
                return await self.reward(task, result)
        finally:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    async def _in_place(self, task: Task, llm: LLM, place: Place) -> Reward:
        """Run the program on a task in Harbor's format in a sandbox, then the task's tests in another sandbox, and return the
        reward that the tests give. `place` has the folders of the rollout. Raises `RunnerError` if the program fails,
        `ConfigError` for options that the task does not permit."""
        if self.grader is not None or self.reward_file or self.files:
            raise ConfigError(
                f"the task {place.task.folder.name} brings its own files and tests: leave out grader, reward_file and files"
            )
        values = self._values(task, llm, WORK)
        environment, stdin = self._environment(llm, place.home, values), fill(self.stdin, values)
        await asyncio.to_thread(place.fill)
        argv, limit = place.inside(self._argv(values)), place.task.agent_timeout
        async with run(argv, environment, place.root, place.work, stdin=stdin, timeout=limit) as result:
            check_sandbox(result)
            if result.exit_code and not result.timed_out:
                self.fail(result)
            await asyncio.to_thread(place.bring_tests)
            argv, environment = place.inside_with_tests(), verifier_environment(place.task, os.environ, place.home)
            limit = place.task.verifier_timeout
            async with run(argv, environment, place.verdict, place.work, timeout=limit) as tests:
                return place.reward(tests)

    def _argv(self, values: Mapping[str, object]) -> list[str]:
        return [self.find(), *arguments_of(self.words, values)]

    def _values(self, task: Task, llm: LLM, folder: str) -> dict[str, object]:
        return values_of(task, llm, f"{ALIAS}{self.name}", folder, self.project)

    def _environment(self, llm: LLM, home: Path, values: Mapping[str, object]) -> dict[str, str]:
        environment = variables_of(self.program, llm, self.name, home, os.environ)
        return environment | {key: fill(value, values) for key, value in self.env.items()}

    def find(self) -> str:
        """Return the full path of the program. Raises `ConfigError` when it is not installed here."""
        named = os.path.join(self.project, self.words[0]) if "/" in self.words[0] else self.words[0]  # noqa: PTH118
        found = shutil.which(named, path=self.env.get("PATH"))
        if found is None:
            where = "is not there, or not executable" if "/" in self.words[0] else "is in no folder of PATH"
            raise ConfigError(
                f"the program {self.words[0]!r} {where}: install it where agents run (in a sandbox, "
                "runner.sandbox_files shows them what lies elsewhere), or give its full path"
            )
        return found

    async def reward(self, task: Task, result: CommandResult) -> Reward:
        """Return the reward of an ended program, from the grader, the reward file or the exit code."""
        if self.grader is not None:
            return await graded(self.grader, task, result)
        if self.reward_file:
            if result.exit_code:
                self.fail(result)
            return reward_of(result, self.reward_file)
        if result.exit_code > 1:
            self.fail(result)
        return 1.0 - result.exit_code

    def fail(self, result: CommandResult) -> NoReturn:
        """Raise `RunnerError` with how the program ended and its last words."""
        code = result.exit_code
        ended = f"was ended by signal {code - 128}" if code > 128 else f"exited with code {code}"
        raise RunnerError(f"{self.program} {ended}: {result.last_words() or 'it printed nothing'}")

    def _fill_folder(self, folder: Path, values: Mapping[str, object]) -> None:
        if not self.files:
            folder.mkdir()
            return
        source = Path(self.project, fill(self.files, values)).expanduser()
        if not source.is_dir():
            raise DataError(
                f"the files of a rollout are to be copied from {source}, which is no folder: mend files={self.files!r}"
            )
        if self.reward_file and os.path.lexists(source / self.reward_file):
            raise DataError(
                f"{source} has a {self.reward_file} already, which would be the reward of a program that writes none: remove it"
            )
        shutil.copytree(source, folder, symlinks=True)


async def graded(grader: Grader, task: Task, result: CommandResult) -> Reward:
    """Return the grader's reward. A grader that is not async runs in a thread, so that it delays no other rollout."""
    if inspect.iscoroutinefunction(grader):
        return cast("Reward", await grader(task, result))
    said: Reward | Awaitable[Reward] = await asyncio.to_thread(grader, task, result)
    return await said if inspect.isawaitable(said) else said


def reward_of(result: CommandResult, name: str) -> Reward:
    """Return the reward in a file: a number, or a JSON object of numbers. Raises `RunnerError` when there is none."""
    try:
        said = read_reward(result.folder / name)
    except OSError as error:
        raise RunnerError(
            f"there is no reward in {name}: {error.strerror}. The program ended with code {result.exit_code} and said: "
            f"{result.last_words() or 'nothing'}"
        ) from error
    except ValueError as error:
        raise RunnerError(
            f"there is no reward in {name}: it must be a number, or a JSON object of numbers: {error}"
        ) from error
    return cast("Reward", said)  # the runner checks every agent's reward


def command(
    command: str | Sequence[str],
    *,
    grader: Grader | None = None,
    reward_file: str = "",
    files: str = "",
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    name: str = "",
) -> Command:
    """Make a program an agent: each rollout runs it in a new, empty folder.

    `command` is a line as you would type it, or a list of arguments. The fields `{task.input}`, `{task.id}`,
    `{task.metadata.KEY}`, `{llm.model}`, `{llm.base_url}`, `{llm.api_key}`, `{folder}` (the rollout's folder) and `{project}`
    (the folder that you start in) are filled after the line was divided into arguments; no shell is involved. They are also
    filled in `stdin`, in the values of `env` (variables in addition to those that lead to the policy) and in `files`, a folder
    that is copied to each rollout's folder.

    The reward is what `grader(task, result)` returns (a number, or a mapping of named ones; it may be async), or what the
    program wrote into `reward_file` below its folder, or else 1.0 for the exit code 0 and 0.0 for 1. With `reward_file` an exit
    code other than 0 fails the rollout; with neither a grader nor `reward_file`, an exit code above 1 does.

    The program's model calls belong to the agent `name`, by default the program's name. Raises `ConfigError` for a command that
    cannot be run: an unknown field, a shell operator, a program that is not installed.
    """
    if grader is not None and reward_file:
        raise ConfigError("a command has a grader or a reward_file, not both: let the grader read the file")
    if Path(reward_file).is_absolute() or ".." in Path(reward_file).parts:
        raise ConfigError(f"the reward_file {reward_file!r} lies outside of a rollout's folder: name a file below it")
    if reward_file and not Path(reward_file).name:
        raise ConfigError(f"the reward_file {reward_file!r} is the rollout's folder itself: name a file below it")
    if grader is not None and not callable(grader):
        raise ConfigError(f"the grader is {grader!r}, which cannot be called with (task, result)")
    env = env or {}
    for text in (files, stdin, *env.values()):
        check_fields(text)
    agent = Command(
        words_of(command), grader=grader, reward_file=reward_file, files=files, stdin=stdin, env=env, name=name
    )
    agent.find()
    if not files:
        for word in agent.words[1:]:
            if not fields_of(word) and not word.startswith(("-", "/")) and Path(word).is_file():
                logger.warning(
                    "%r is a file here, and %s runs in an empty folder: write {project}/%s if you mean the file",
                    word,
                    agent.program,
                    word,
                )
    return agent


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a usage error as `ConfigError`."""
        raise ConfigError(
            f"command: {message}. Its options stand before the program: {self.format_usage().split(': ', 1)[1].strip()}"
        )


def from_text(text: str) -> Command:
    """Make the agent of `command:TEXT`. Options may come before the program: `--grader my_app:grade claude -p {task.input}`."""
    from lightning.cli.output import import_named

    parser = _Options(prog="command:", add_help=False, allow_abbrev=False)
    parser.add_argument("--grader", metavar="MODULE:FUNCTION")
    parser.add_argument("--reward-file", default="", metavar="FILE")
    parser.add_argument("--files", default="", metavar="FOLDER")
    parser.add_argument("--stdin", default="", metavar="TEXT")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--name", default="")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    try:
        given = parser.parse_args(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"the command {text!r} cannot be cut into arguments: {error}") from error
    for pair in given.env:
        if "=" not in pair:
            raise ConfigError(f"command: --env {pair!r} is no NAME=VALUE")
    grader = None if given.grader is None else cast("Grader", import_named(given.grader, "grader"))
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    return command(
        shlex.join(words),
        grader=grader,
        reward_file=given.reward_file,
        files=given.files,
        stdin=given.stdin,
        env=dict(pair.split("=", 1) for pair in given.env),
        name=given.name,
    )
