"""The settings of several policy servers, in the section `policy_server`."""

from __future__ import annotations

from typing import ClassVar

from lightning.config import PluginSettings
from pydantic import Field

OWN_GPU_SHARE = 0.9
"""The fraction of its GPUs' memory that a vLLM takes which shares them with nobody (vLLM's own default)."""


class ReplicasConfig(PluginSettings):
    """Several vLLMs for one policy."""

    place: ClassVar[str] = "policy_server"
    replicas: int = Field(default=1, ge=1)
    """Number of vLLMs that lightning starts for the policy, each with the whole model: on CUDA each on GPUs of its own, on a
    CPU as processes that divide the cores. With `policy_server.port` they take that port and the next ones."""
    gpus_each: int | None = Field(default=None, ge=1)
    """Number of GPUs of each vLLM that lightning starts, over which its model is divided. null is 1 with several replicas; with
    one it leaves the choice to `policy_server.gpus` and `policy_server.args`."""
