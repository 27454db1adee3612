"""The sections of the runners that use other machines. Every field is documented here and nowhere else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from lightning.config.section import Section


class RayConfig(Section):
    """Agents in actors of a Ray cluster."""

    address: str = ""
    """Ray cluster: `auto`, `HOST:6379` of its head, or `ray://HOST:10001`; empty starts one on this machine."""
    agents_per_actor: int = Field(default=1, ge=1)
    """Number of agents that run at once in one actor. They share its imports and resources; each has its own process."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for an actor."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for an actor."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that Ray reserves for an actor; 0 reserves none."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that an actor needs, by name. They select the nodes."""
    scheduling: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """Ray's placement: `DEFAULT` fills a node first, `SPREAD` uses all of them evenly."""
    runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of the actors (`working_dir`, `pip`, `env_vars`, ...), passed unchanged. It is stored
    with the run: put no secret in it."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Time limit in seconds until Ray has placed an actor and the actor has loaded the agent."""


class KubernetesConfig(Section):
    """Agents in pods of a Kubernetes cluster, each of which runs `lightning runner`."""

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
    """Path of a YAML file with a Pod (or its `metadata` and `spec`), into which lightning's Pod is merged. Use it for
    volumes, tolerations and everything that has no setting here. The container called `runner`, or the only one, becomes
    the client."""
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
