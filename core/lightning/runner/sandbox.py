"""A sandbox for agents' processes: bubblewrap, where it is installed.

The invariant: an agent in it sees the system, the interpreter and the project read-only, a /tmp of its own, no process but its
own, and neither your home nor the folders of runs, where the store and its secrets lie. Its network is the machine's.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.errors import RunnerError

logger = logging.getLogger(__name__)

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store")
"""Parts of the system that programs need. Absent ones are left out."""
SECRET_FILES = ("/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/sudoers", "/etc/sudoers.d")
NOT_WHOLE = frozenset({"/", "/tmp", "/home", "/root", "/proc", "/dev"})  # noqa: S108 — compared
"""Folders that nobody means to show as a whole, though a path of Python may be one of them."""
PARENT = 1
"""What is the parent of the fork server in there: the sandbox's own init."""
ISOLATION = (
    "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--die-with-parent", "--cap-drop", "ALL",
)  # fmt: skip


def bubblewrap(files: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """The beginning of a command line that runs the rest of it in a sandbox.

    `files` may be read besides, `hidden` are folders that may not, below what may. One that is not there yet is made when it is
    below the project or `files`: only what is there can be hidden, and what another process made later would be seen.

    Raises `RunnerError` when bubblewrap is not installed, a file is not there, your home would be shown as a whole, or what
    agents need would be hidden.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise RunnerError(
            f"runner.sandbox is 'bwrap' and there is no {PROGRAM} here: install bubblewrap (apt install bubblewrap, "
            "dnf install bubblewrap; Linux only), or set runner.sandbox to 'none' and let a container keep agents in"
        )
    for file in files:
        if not Path(file).expanduser().exists():
            raise RunnerError(
                f"runner.sandbox_files names {file!r}, which is not there: take it out, or write its full path"
            )
    command = [program, *ISOLATION, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108 — one of its own
    for path in _readable(files):
        command += ["--ro-bind", path, path]
    _make([path for path in hidden if _is_below(path, [os.getcwd(), *files])])  # noqa: PTH109 — as it is bound
    for path in _unreadable(hidden):
        for needed in (os.getcwd(), *files):  # noqa: PTH109 — as it is bound
            if Path(os.path.realpath(Path(needed).expanduser())).is_relative_to(path):
                raise RunnerError(
                    f"runner.sandbox is 'bwrap' and {path} is hidden from agents, which need {needed} in it: a run and its "
                    "SQLite store must lie in folders of their own (--out, --store), and apart from what "
                    "runner.sandbox_files names; runner.sandbox_hidden has the other folders"
                )
        command += ["--tmpfs", path] if Path(path).is_dir() else ["--ro-bind", "/dev/null", path]
    return [*command, "--setenv", "HOME", "/tmp", "--chdir", os.getcwd(), "--"]  # noqa: PTH109, S108


def _readable(files: Sequence[str]) -> Iterator[str]:
    """What is bound, outer folders first, so that none hides another."""
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, os.getcwd(), *sys.path]  # noqa: PTH109
    paths += [str(Path(file).expanduser().absolute()) for file in files]
    given = {path if path in SYSTEM else os.path.realpath(path) for path in paths if path} - NOT_WHOLE
    home = Path(os.path.realpath(Path.home()))
    for path in sorted(path for path in given if Path(path).exists()):
        if home.is_relative_to(path) and path not in SYSTEM:
            raise RunnerError(
                f"runner.sandbox is 'bwrap' and would show agents your whole home, {path}: start in the project's own folder, "
                "and name files below your home in runner.sandbox_files one by one"
            )
        yield path


def _is_below(path: str, folders: Sequence[str]) -> bool:
    real = Path(os.path.realpath(Path(path).expanduser()))
    return any(real.is_relative_to(os.path.realpath(Path(folder).expanduser())) for folder in folders)


def _make(folders: Sequence[str]) -> None:
    """Make what is not there. Where that is not permitted agents are no worse off, and neither could make it later."""
    for folder in folders:
        found = Path(folder).expanduser()
        if found.exists():
            continue
        try:
            if "." in found.name:
                raise OSError("it looks like a file")
            found.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "runner.sandbox_hidden names %s, which is not there and cannot be made (%s): if somebody makes it while "
                "agents run, they see it",
                folder,
                error,
            )


def _unreadable(hidden: Sequence[str]) -> Iterator[str]:
    for path in (*SECRET_FILES, *hidden):
        found = Path(path).expanduser().absolute()
        if found.exists():
            yield os.path.realpath(found)
