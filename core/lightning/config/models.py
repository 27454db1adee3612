"""The sections of the configuration. Every field is documented here and nowhere else; unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning.config.limits import LimitsConfig
from lightning.config.optimizer_model import OptimizerModelConfig
from lightning.config.runners import KubernetesConfig, RayConfig
from lightning.config.section import Section
from lightning.config.verl import VerlConfig
from lightning.types import DEFAULT_PROJECT

TaskOrder = Literal["shuffled", "given"]


class TrainerConfig(Section):
    """The loop."""

    steps: int = Field(default=40, ge=0)
    """Optimizer steps to take."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Groups per step; the number of rollouts is this times the algorithm's group size."""
    max_staleness: int = Field(default=0, ge=0)
    """How many optimizer steps old the policy that sampled a trained token may be. 0 samples and trains in turns; more lets
    rollouts go on while the engine trains, and carries slow ones over to later steps."""
    max_waves: int = Field(default=4, ge=1)
    """For algorithms with dynamic sampling: a step samples at most so many times `tasks_per_step` groups in search of as many
    that teach something."""
    order: TaskOrder = "shuffled"
    """How each pass over the training tasks takes them: `shuffled` by the seed, another way in each pass, or as `given`, in the
    order of the list (a curriculum)."""
    eval_every: int = Field(default=10, ge=0)
    """Evaluate on the held-out tasks every so many steps, and always before the first and after the last; 0 only then."""
    eval_temperature: float | None = Field(default=None, ge=0.0)
    """Sampling temperature of evaluations; null leaves the agent's own."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Write the training state every so many steps, beside the run; steps since then are replayed from the store on resume.
    null writes it when training since the last one has taken ten times as long as writing it, and after each step of verl,
    whose lost workers go on from it. The last step is always saved, and so is a run that is told to stop."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""
    seed: int = 0
    """Seeds the shuffled order of tasks, the sampler and the engine."""
    project: str = DEFAULT_PROJECT
    """The project that a run and its prompts and weights belong to. A server's tokens open one project; runners with a token of
    this one find the run. `lightning serve --store` makes its first runner token for it."""
    trackers: tuple[str, ...] = ("jsonl", "tensorboard")
    """Where metrics go besides the store."""
    max_logprob_gap: float | None = Field(default=None, gt=0)
    """Warn when |trainer - sampler| exceeds this on any token (nats) of a step without stale tokens; a probe beyond it after an
    update brings the weights once more, and ends the run when they are not served then. null is by dtype: with float32 0.001 on
    any token, with bfloat16 0.05 in the mean and 0.6 on 99.9 % of the tokens."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), by peft."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale; the update is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter."""


StepKind = Literal["auto", "tree", "linear", "per-call"]


class EngineConfig(Section):
    """What trains."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and compute; `auto` is `policy_server.dtype` where that is named, else what is chosen for both (see there);
    beside a vLLM that is attached, float32 on a CPU and bfloat16 on a GPU."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    threads: int = Field(default=1, ge=0)
    """torch threads on a CPU (0 leaves torch's default); one is fastest beside a policy server on the same cores."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Padded tokens per forward and backward pass, at most; over a tree on a CPU not more than 1.25 GiB of activations."""
    lr: float | None = Field(default=None, gt=0)
    """AdamW's learning rate; null is 1e-6, and 1e-4 with `lora`: few numbers have to move far."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient's global norm to this."""
    max_nonfinite_steps: int = Field(default=3, ge=0)
    """Steps in a row that are skipped because a loss or gradient is not finite; one more ends the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""
    step: StepKind = "auto"
    """How rows are computed: `tree` (each shared prefix once), `linear` (merged rows), `per-call` (a row for each call), or
    `auto`: a tree where the model can and enough is shared. All give the same gradient; the metric `tree` says which it was."""
    gradient_checkpointing: bool = False
    """Trade compute for memory in the backward pass."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    critic_lr: float = Field(default=0.05, gt=0)
    """Learning rate of the critic, for algorithms that have one; a step moves a value by about this much, in any model."""
    critic_trunk: Literal["frozen", "shared"] = "frozen"
    """Whether the critic's loss trains its own layer only, on the model's hidden states, or the model too."""
    verl: VerlConfig = VerlConfig()


class PolicyServerConfig(Section):
    """vLLM: our own process, or one that runs already."""

    attach: str = ""
    """Root URL of a running vLLM to use; empty starts one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Profile of arguments and environment for an owned server."""
    host: str = "127.0.0.1"
    """Address of an owned server; the RL routes of vLLM are open, so keep it on loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of an owned server; 0 takes a free one."""
    dtype: str = "auto"
    """vLLM's dtype; `auto` is `engine.dtype` where that is named, else chosen for both: bfloat16 on CUDA, and for 50 M
    parameters or more on a CPU that is faster in bfloat16, else float32."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus response, in tokens; null is the model's own context, as far as the KV cache goes."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """KV cache; null is by the model's size and `runner.concurrency` on a CPU, what `gpu_memory_utilization` leaves on CUDA."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Share of the GPU's memory for a CUDA server (the trainer needs the rest)."""
    tool_call_parser: str = "auto"
    """vLLM's parser for tool calls; `auto` is that of the model's family, where its chat template knows tools; empty leaves
    tool calling off."""
    reasoning_parser: str = "auto"
    """vLLM's parser for reasoning; `auto` is that of the model's family, where its chat template asks for it; empty is none."""
    args: tuple[str, ...] = ()
    """Further arguments for `vllm serve`, as they are."""
    start_timeout: float | None = Field(default=None, gt=0)
    """Seconds until a server must answer; null is 300 on a CPU and 1800 on CUDA, and one for each 100 MB of weights."""
    weight_transfer: Literal["auto", "shared_memory", "file", "gloo", "nccl"] = "auto"
    """How vLLM gets new weights: from a `file` in the run's folder, which it sees under the trainer's path; from one in
    `shared_memory` (/dev/shm), which must hold the weights 2.2 times; or sent to it, by `gloo` (TCP; any machine) or by `nccl`
    (from a GPU on which no vLLM runs). `auto` is shared memory where there is room and vLLM is ours, else a file."""
    transfer_timeout: float = Field(default=600.0, gt=0)
    """Seconds in which weights that are sent must be there."""


class GatewayConfig(Section):
    """The OpenAI-compatible front."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    token_ttl: float = Field(default=3600.0, gt=0)
    """Seconds for which a rollout's API key is valid."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Requests above this get a 413."""
    hold_timeout: float = Field(default=600.0, gt=0)
    """Seconds a request may wait during a weight update before it gets a 503."""
    upstream_timeout: float = Field(default=600.0, gt=0)
    """Seconds without a byte from vLLM until it is asked whether its engine works on; the call counts as failed when there is
    no answer for as long again."""
    override_sampling: dict[str, float | int] = Field(default_factory=dict)
    """Sampling parameters forced on every request; empty keeps the agents' own."""
    seed_calls: bool = False
    """Give calls without a `seed` one that follows from trainer.seed, the rollout's place in the run and the call's number:
    a synchronous run then samples the same tokens each time, as far as vLLM does."""
    allowed_upstreams: tuple[str, ...] = ("loopback", "private")
    """Policy servers of other processes that calls may be sent to, by host: `loopback`, `private` (networks of one's own),
    networks (`203.0.113.0/24`) and names (`gpu-*.example.org`). What this process was given itself is always allowed."""
    limits: LimitsConfig = LimitsConfig()
    """What one client may take of the port."""


class RunnerConfig(Section):
    """Where and how agents run."""

    concurrency: int = Field(default=32, ge=1)
    """Agents at once; the process runner keeps one process for each."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds one rollout may take."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts per rollout; only infrastructure failures are retried."""
    lease_ttl: float = Field(default=60.0, gt=0)
    """Seconds until a silent runner's work is given to another."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that the agents of a `lightning runner` get to end when it is told to; then their work is given back."""
    adapters: tuple[str, ...] | None = None
    """Adapters to install in the agents' processes; null installs every one that is found."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Prompt templates to run agents with instead of their own, by the name of the `component` that has the prompt: texts, or
    versions of resources as `resource:NAME@ALIAS` (of another store `resource:PLACE#NAME@ALIAS`)."""
    reroute: tuple[str, ...] = ()
    """Hosts whose calls are brought to the policy, for agents that name a provider in their code (`api.openai.com`)."""
    preload: tuple[str, ...] = ()
    """Modules the fork server imports once, so that a new process starts at once."""
    rollouts_per_process: int = Field(default=1000, ge=1)
    """A worker process is replaced after so many rollouts."""
    sandbox: Literal["none", "bwrap"] = "none"
    """Keeps agents' processes in: `bwrap` shows them the system and the project read-only and no other process (Linux)."""
    sandbox_files: tuple[str, ...] = ()
    """Further files and folders that agents in a sandbox may read."""
    sandbox_hidden: tuple[str, ...] = ("runs",)
    """Files and folders of the project that they may not: where runs, and so the store and its secrets, lie."""
    ray: RayConfig = RayConfig()
    k8s: KubernetesConfig = KubernetesConfig()


class ServerConfig(Section):
    """Lightning Server: the control API and the gateway on one port, for clients that run elsewhere."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    public_url: str = ""
    """Where clients reach this server, when that is not the address it binds (behind a proxy, in a container)."""


class Config(Section):
    """Everything that can be set. Precedence: arguments and `--set`, then `LIGHTNING_*`, then the TOML file."""

    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    policy_server: PolicyServerConfig = PolicyServerConfig()
    gateway: GatewayConfig = GatewayConfig()
    server: ServerConfig = ServerConfig()
    runner: RunnerConfig = RunnerConfig()
    optimizer_model: OptimizerModelConfig = OptimizerModelConfig()
