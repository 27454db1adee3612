"""The settings of each of several policy servers, and the check that servers which others run can serve one policy.

The invariant: no two servers that lightning starts share a port or a GPU, and none has the trainer's GPU. A set that cannot be
is refused before anything is started; servers that differ in model, dtype or context are refused before any gets a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from lightning.config import Config, PolicyServerConfig, with_settings
from lightning.errors import ConfigError, PolicyServerError
from lightning.policy_server.auto_settings import pick_device
from lightning.policy_server.protocol import PolicyServer
from lightning.policy_server.vllm_arguments import argument

from lightning_replicas.config import OWN_GPU_SHARE, ReplicasConfig

LAST_PORT = 65535
PARALLEL = "--tensor-parallel-size"


@runtime_checkable
class TellsFacts(Protocol):
    """A policy server that tells what it serves."""

    async def facts(self) -> Mapping[str, object]:
        """Return facts that are the same for all servers of one policy, by their names."""


class Replicas:
    """Implements `lightning.policy_server.servers.ServerSet`."""

    def settings(self, config: Config) -> Sequence[Config]:
        """Return the settings of each server. Raises `ConfigError` for more servers than GPUs or ports, for replicas of servers
        that others run, and for a URL that is given twice."""
        section, replicas = config.policy_server, ReplicasConfig.of(config).replicas
        if section.attach:
            return [_alone(config, {"policy_server.attach": url}) for url in _urls(section, replicas)]
        if replicas == 1 and ReplicasConfig.of(config).gpus_each is None and (section.gpus or not section.placement):
            return [config]
        if section.port and section.port + replicas - 1 > LAST_PORT:
            raise ConfigError(
                f"policy_server.port = {section.port} leaves {LAST_PORT - section.port + 1} ports for "
                f"policy_server.replicas = {replicas}, which take one each: set a lower port, or 0 for free ones"
            )
        gpus = deal(config, replicas)
        return [
            _alone(config, {"policy_server.port": section.port and section.port + number, **_on_gpus(section, own)})
            for number, own in enumerate(gpus)
        ]

    async def check(self, servers: Sequence[PolicyServer]) -> None:
        """Raise `PolicyServerError` for servers that others run and that differ in model, dtype or context."""
        known: dict[str, tuple[object, str]] = {}
        for server in servers if len(servers) > 1 else ():
            for name, value in (await server.facts()).items() if isinstance(server, TellsFacts) else ():
                first, url = known.setdefault(name, (value, server.url))
                if value != first:
                    raise PolicyServerError(
                        f"the vLLMs at {url} and {server.url} cannot serve one policy: their {name} is {first} and {value}. "
                        "Start both with the same model and arguments, or take one out of policy_server.attach"
                    )


def _alone(config: Config, settings: Mapping[str, object]) -> Config:
    """Return the settings of one server, with these of its own."""
    return with_settings(config, {"policy_server.replicas": 1, "policy_server.gpus_each": None, **settings})


def _urls(section: PolicyServerConfig, replicas: int) -> Sequence[str]:
    """Return the URLs of servers that others run, each once. Raises `ConfigError`."""
    urls = (section.attach,) if isinstance(section.attach, str) else section.attach
    if replicas > 1:
        raise ConfigError(
            f"policy_server.replicas = {replicas} starts vLLMs, and policy_server.attach names running ones: leave out one of "
            "the two. To attach to several, give policy_server.attach their URLs as a list"
        )
    if any(not url for url in urls):
        raise ConfigError("policy_server.attach has an empty URL: give the root URL of each vLLM, or leave it out")
    roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
    if twice := sorted({root for root in roots if roots.count(root) > 1}):
        raise ConfigError(f"policy_server.attach names {', '.join(twice)} twice: each vLLM is one server, name it once")
    return urls


def deal(config: Config, replicas: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each server that lightning starts, by their numbers among the visible ones; empty tuples on a CPU.
    Where servers start at another place, each has the first GPUs that it sees there. Raises `ConfigError` if there are too
    few."""
    section, each = config.policy_server, ReplicasConfig.of(config).gpus_each
    if pick_device(section) != "cuda":
        if each is not None:
            raise ConfigError(
                f"policy_server.gpus_each = {each} counts GPUs, and vLLM runs on the CPU here: leave it out, or set "
                "policy_server.device = 'cuda'"
            )
        return [()] * replicas
    if section.placement and section.gpus:
        raise ConfigError(
            f"policy_server.gpus = {list(section.gpus)} names GPUs of this machine, and with policy_server.placement = "
            f"{section.placement!r} vLLM gets GPUs elsewhere: leave it out (policy_server.gpus_each says how many)"
        )
    if section.placement:
        return [tuple(range(each or 1))] * replicas
    count, trainers = visible_gpus(), _trainers_gpu(config.engine.device)
    free = list(section.gpus) or [number for number in range(count) if number != trainers]
    if len(set(free)) < len(free):
        raise ConfigError(
            f"policy_server.gpus = {free} names a GPU twice: each is of one vLLM, name it once. For two on "
            "one GPU start both yourself, each with a share of its memory, and attach to them (policy_server.attach)"
        )
    each = each or 1
    if replicas * each > len(free):
        where = (
            f"policy_server.gpus names {len(free)}"
            if section.gpus
            else f"{count} are visible (CUDA_VISIBLE_DEVICES), of which the trainer has one (engine.device = "
            f"{config.engine.device!r})"
            if trainers is not None
            else f"{count} are visible (CUDA_VISIBLE_DEVICES)"
        )
        most = len(free) // each
        cure = f"set policy_server.replicas to {most}" if most else "lower policy_server.gpus_each"
        raise ConfigError(
            f"policy_server.replicas = {replicas} with {each} GPU{'s' * (each > 1)} each need {replicas * each} GPUs, and "
            f"{where}: {cure}, or have vLLMs on other machines (policy_server.placement, policy_server.attach)"
        )
    return [tuple(free[number * each : (number + 1) * each]) for number in range(replicas)]


def visible_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


def _trainers_gpu(device: str) -> int | None:
    """Return the number of the GPU on which the trainer computes; None on a CPU."""
    kind, _, number = device.partition(":")
    return None if kind == "cpu" else int(number or 0)


def _on_gpus(section: PolicyServerConfig, gpus: tuple[int, ...]) -> dict[str, object]:
    """Return the settings of a server that has GPUs of its own; empty on a CPU."""
    if not gpus:
        return {}
    found: dict[str, object] = {"policy_server.gpus": gpus}
    if "gpu_memory_utilization" not in section.model_fields_set:
        found["policy_server.gpu_memory_utilization"] = OWN_GPU_SHARE
    if len(gpus) > 1 and not any(argument(section.args, flag) for flag in (PARALLEL, "-tp")):
        found["policy_server.args"] = (*section.args, PARALLEL, str(len(gpus)))
    return found
