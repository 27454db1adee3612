"""The sections of the runners that use other machines. Every field is documented here and nowhere else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from lightning.config.section import Section


class RayConfig(Section):
    """Agents in actors of a Ray cluster."""

    address: str = ""
    """The cluster: `auto`, `HOST:6379` of its head, or `ray://HOST:10001`; empty starts one on this machine."""
    agents_per_actor: int = Field(default=1, ge=1)
    """Agents at once in one actor. They share its imports and its resources; each still has a process of its own."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for an actor."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for an actor."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that Ray reserves for an actor; 0 reserves none."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources that an actor needs, by name: what marks the nodes it may run on."""
    scheduling: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """Ray's placement: `DEFAULT` fills a node first, `SPREAD` uses all of them evenly."""
    runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of the actors (`working_dir`, `pip`, `env_vars`, ...), as it is. It is kept with the run: put
    no secret in it."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds until an actor must have started: until Ray found room for it and the agent is loaded there."""


class KubernetesConfig(Section):
    """Agents in pods of a Kubernetes cluster, each of which runs `lightning runner`."""

    mode: Literal["pool", "job"] = "pool"
    """`pool` keeps `pods` pods that run one rollout after the other; `job` makes a Job for each rollout."""
    pods: int = Field(default=1, ge=1)
    """Pods of the pool; each runs its share of `runner.concurrency`. Jobs are at most `runner.concurrency` at once."""
    image: str = ""
    """Image with this release of lightning and the agent; empty takes the one in `template`."""
    agent: str = ""
    """The agent as `module:name` in that image; empty takes the trainer's own by the name it has here."""
    namespace: str = ""
    """Namespace of the pods; empty takes the trainer's own pod's, or that of the kubeconfig's context."""
    kubeconfig: str = ""
    """Path of a kubeconfig; empty uses the service account inside a cluster, elsewhere `KUBECONFIG` or `~/.kube/config`."""
    context: str = ""
    """The kubeconfig's context; empty takes its current one."""
    template: str = ""
    """Path of a YAML file with a Pod (or its `metadata` and `spec`) that ours is merged into: volumes, tolerations and whatever
    has no setting here. The container called `runner`, or the only one, becomes the client."""
    service_account: str = ""
    """Service account of the pods. Its token is not mounted, unless the template says so."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the agents' environment. They are kept with the run: give secrets by `template` (`valueFrom`)."""
    requests: dict[str, str] = Field(default_factory=dict)
    """What a pod asks for: `cpu = "2"`, `memory = "4Gi"`."""
    limits: dict[str, str] = Field(default_factory=dict)
    """What a pod may use at most, in the same words."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with the registry's credentials."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds until the first pod must run, time for the image and for new nodes included."""
