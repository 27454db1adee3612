"""The servers of a policy: from the settings of a run, the settings of each of its policy servers, and the servers themselves.

The invariant: a policy has at least one server. A plugin says which settings each of several servers has; without it there is
one, with the settings of the run. All of them compute with the same model and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lightning.errors import PolicyServerError
from lightning.plugins import plugins

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.policy_server.protocol import PolicyServer


class ServerSet(Protocol):
    """The several servers of one policy, as a plugin registers them with `register_server_sets`. It keeps nothing."""

    def settings(self, config: Config) -> Sequence[Config]:
        """Return the settings of each server: those of the run with a port, an address or GPUs of its own. Raises `ConfigError`
        for settings that cannot be met."""

    async def check(self, servers: Sequence[PolicyServer]) -> None:
        """Check servers that have started. Raises `PolicyServerError` for those that cannot be servers of one policy."""


def _server_set() -> ServerSet | None:
    if not plugins().names("server_sets"):
        return None
    return cast("Callable[[], ServerSet]", plugins().sole("server_sets", "several policy servers"))()


def settings_of_servers(config: Config) -> Sequence[Config]:
    """Return the settings of each server of the policy. Raises `ConfigError` for settings that cannot be met, and `PluginError`
    for several servers where no plugin has them."""
    found = _server_set()
    if found is not None:
        return found.settings(config)
    if not isinstance(config.policy_server.attach, str):
        plugins().sole("server_sets", "policy_server.attach with several URLs")
    return [config]


def log_of_server(folder: Path, number: int, count: int) -> Path:
    """Return the log file of a server in a run's folder: `vllm.log`, or `vllm-0.log`, ... where there are several."""
    return folder / (f"vllm-{number}.log" if count > 1 else "vllm.log")


async def check_servers(servers: Sequence[PolicyServer]) -> None:
    """Check servers that have started. Raises `PolicyServerError` for those that cannot be servers of one policy."""
    urls = [server.url for server in servers]
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        raise PolicyServerError(f"{', '.join(twice)} is named twice as a policy server: name each server once")
    if (found := _server_set()) is not None:
        await found.check(servers)
