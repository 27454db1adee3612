"""The settings `runner.k8s`."""

from __future__ import annotations

from typing import ClassVar, Literal

from lightning.config import PluginSettings
from pydantic import Field


class KubernetesConfig(PluginSettings):
    """Agents in pods of a Kubernetes cluster, each of which runs `lightning runner`."""

    place: ClassVar[str] = "runner.k8s"

    mode: Literal["pool", "job"] = "pool"
    """`pool` keeps `pods` pods, which run one rollout after another; `job` makes a Job for each rollout."""
    pods: int = Field(default=1, ge=1)
    """Number of pods in the pool; each runs its share of `runner.concurrency`. In `job` mode at most
    `runner.concurrency` Jobs run at once."""
    image: str = ""
    """Image with this release of lightning and the agent; empty takes the image in `template`."""
    agent: str = ""
    """The agent as `module:name` in that image; empty takes the name that it has in the trainer's process."""
    namespace: str = ""
    """Namespace of the pods; empty takes that of the trainer's pod, or that of the kubeconfig's context."""
    kubeconfig: str = ""
    """Path of a kubeconfig. Empty uses the service account inside a cluster, and `KUBECONFIG` or `~/.kube/config`
    elsewhere."""
    context: str = ""
    """The kubeconfig's context; empty takes its current one."""
    template: str = ""
    """Path of a YAML file with a Pod (or its `metadata` and `spec`), into which lightning's Pod is merged, for everything that
    has no setting here. The container called `runner`, or the only one, becomes the client."""
    service_account: str = ""
    """Service account of the pods. Its token is not mounted unless the template mounts it."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agents. They are stored with the run: give secrets by `template` (`valueFrom`)."""
    requests: dict[str, str] = Field(default_factory=dict)
    """Resource requests of a pod: `cpu = "2"`, `memory = "4Gi"`."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Resource limits of a pod, in the same form."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with the registry's credentials."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Time limit in seconds until the first pod runs, including the image pull and the start of new nodes."""
