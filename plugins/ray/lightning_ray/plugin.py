"""The plugin `ray`: agents, and the policy's vLLMs, in a Ray cluster. Ray is imported when these start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning.hooks import hookimpl, later, made_later

if TYPE_CHECKING:
    from lightning.cli.check import Check
    from lightning.config import Config, PluginSettings
    from lightning.policy_server.protocol import PolicyServer
    from lightning.runner.protocol import Agent, Runner


@hookimpl
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register the settings `runner.ray` and `policy_server.ray`."""
    register("runner.ray", later("lightning_ray.config:RayConfig"))
    register("policy_server.ray", later("lightning_ray.config:RayServersConfig"))


@hookimpl
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Register the runner `ray`."""
    register("ray", ray_runner)


@hookimpl
def register_placements(register: Callable[[str, Callable[..., PolicyServer]], None]) -> None:
    """Register the placement `ray`."""
    register("ray", vllm_on_ray)


@hookimpl
def register_checks(register: Callable[[str, Callable[[str | None], Iterable[Check]]], None]) -> None:
    """Register the check `ray` of `lightning doctor`."""
    register("ray", made_later("lightning_ray.doctor:check_ray"))


def ray_runner(agent: Agent, config: Config) -> Runner:
    """Make the runner whose agents run in actors of a Ray cluster."""
    from lightning_ray.runner import RayRunner

    return RayRunner(agent, config.runner)


def vllm_on_ray(*given: Any, **named: Any) -> PolicyServer:
    """Make a vLLM that is started on a node of a Ray cluster (`lightning_ray.vllm_on_ray.VLLMOnRay`)."""
    from lightning_ray.vllm_on_ray import VLLMOnRay

    return VLLMOnRay(*given, **named)
