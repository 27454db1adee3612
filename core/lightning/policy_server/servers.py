"""The servers of a run: the models that it serves, the settings of each policy server, and the check of the servers themselves.

The invariant: a run serves one model, or each of several that its policies need. Each model has at least one server, and all
models have equally many. A plugin says which settings each of several servers has; without it there is one, with the settings
of the run. All servers of one model compute with the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lightning.errors import PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.policies import ServedModel

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.policy_server.protocol import PolicyServer


class ServerSet(Protocol):
    """The several servers of a run, as a plugin registers them with `register_server_sets`. It keeps nothing."""

    def settings(self, config: Config, models: int) -> Sequence[Config]:
        """Return the settings of each server, those of the first of so many models first: those of the run with a port, an
        address or GPUs of its own. Raises `ConfigError` for settings that cannot be met."""

    async def check(self, servers: Sequence[PolicyServer]) -> None:
        """Check servers of one model that have started. Raises `PolicyServerError` for those that cannot be."""


def _server_set() -> ServerSet | None:
    if not plugins().names("server_sets"):
        return None
    return cast("Callable[[], ServerSet]", plugins().sole("server_sets", "several policy servers"))()


def settings_of_servers(config: Config, models: int | None = None) -> Sequence[Config]:
    """Return the settings of each server of so many models (None: of all that the policies of a run need), those of the first
    model's servers first (`served_models`). Raises `ConfigError` for settings that cannot be met, and `PluginError` for several
    servers where no plugin has them."""
    found = _server_set()
    if models is None:
        several = plugins().policy_set(config)
        models = 1 if several is None else several.count
    if found is not None:
        return found.settings(config, models)
    if models > 1:
        plugins().sole("server_sets", "policies with servers of their own")
    if not isinstance(config.policy_server.attach, str):
        plugins().sole("server_sets", "policy_server.attach with several URLs")
    return [config]


def served_models(model: Path, config: Config) -> Sequence[ServedModel]:
    """Return the models that a run with the model folder `model` serves: that one, or those that its policies need. Raises
    `ConfigError` for a policy's model that does not exist."""
    several = plugins().policy_set(config)
    return [ServedModel(model, [config.engine.lora])] if several is None else several.models(model)


def log_of_server(folder: Path, number: int, count: int) -> Path:
    """Return the log file of a server in a run's folder: `vllm.log`, or `vllm-0.log`, ... where there are several."""
    return folder / (f"vllm-{number}.log" if count > 1 else "vllm.log")


async def check_servers(servers: Sequence[PolicyServer]) -> None:
    """Check servers that have started. Raises `PolicyServerError` for those that cannot be servers of the same policies."""
    urls = [server.url for server in servers]
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        raise PolicyServerError(f"{', '.join(twice)} is named twice as a policy server: name each server once")
    alike: dict[tuple[str, ...], list[PolicyServer]] = {}
    for server in servers:
        alike.setdefault(tuple(policy for policy, _ in server.models), []).append(server)
    if (found := _server_set()) is not None:
        for each in alike.values():
            await found.check(each)
