"""The sections of the configuration. Every field is documented here and nowhere else; unknown keys are errors."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from lightning.errors import ConfigError


class Section(BaseModel):
    """The base of all sections: they are frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __new__(cls, *args: object, **given: object) -> Self:
        """Raise `ConfigError` for a name that the section does not have. Validation of other data calls this without names."""
        known = cls.model_fields
        if unknown := [name for name in given if name not in known and cls.model_config.get("extra") == "forbid"]:
            from lightning.config.other_words import unknown_argument

            raise ConfigError("\n".join(unknown_argument(cls.__name__, name, known) for name in unknown))
        return super().__new__(cls)


def check_endpoint(base_url: str, api_key_env: str, whose: str = "the optimiser model") -> None:
    """Raise `ConfigError`, naming `whose` endpoint it is, if the URL is malformed, or if the URL or the variable's name may
    hold a password or a key, because settings are stored with the run."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url={base_url!r} of {whose} is no URL: write https://.../v1")
    if "@" in base_url.split("/", 3)[2] or "?" in base_url:
        raise ConfigError(
            f"base_url of {whose} has a user, a password or a query in it, and settings are kept with the run: "
            "write https://.../v1 alone, with the key in the environment variable that api_key_env names"
        )
    if api_key_env and not api_key_env.isidentifier():
        raise ConfigError(
            f"api_key_env of {whose} cannot name an environment variable: give the name of the variable that "
            "holds the key, not the key"
        )


class LimitsConfig(Section):
    """Limits for one client of a port. Too many requests get status 429, too slow ones status 408."""

    hosts: tuple[str, ...] = ()
    """Accepted host names of requests, in addition to loopback: for example the name of a proxy in front. A port that is
    bound beyond loopback checks names only when some are given here."""
    body_memory: int | None = Field(default=None, ge=1 << 20)
    """Bytes of memory for the bodies of requests in progress, over all tokens: three for each byte and 128 for each JSON value.
    null takes an eighth of the memory. A token may hold as much as is still free (half of it when alone); more waits up to
    10 s (429)."""
    json_values: int = Field(default=500_000, ge=0)
    """Maximum of JSON values in a model call, counted by commas and opening brackets before it is parsed (413); four times as
    many at the control API and in spans. 0 sets no limit."""


FixedOrder = Literal["shuffled", "given"]


class TrainerConfig(Section):
    """The training loop."""

    steps: int = Field(default=40, ge=0)
    """Optimizer steps to take."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Groups per step; the number of rollouts is this times the algorithm's group size."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest age, in optimizer steps, of the policy that sampled a trained token. With 0, sampling and training
    alternate. With more, rollouts continue while the engine trains, and slow rollouts are used in later steps."""
    max_reuse: int = Field(default=0, ge=0)
    """Number of further steps in which a rollout may be trained after its first, in a loop of your own (`Trainer.session`).
    `max_staleness` must allow the age."""
    max_waves: int = Field(default=4, ge=1)
    """For algorithms with dynamic sampling: a step samples at most this many times `tasks_per_step` groups to find
    `tasks_per_step` groups whose rewards differ."""
    order: str = "shuffled"
    """Order of the training tasks in each pass: `shuffled` (by the seed, differently in each pass), `given` (the order of the
    list, for a curriculum), or a plugin's: `learnable` takes the tasks whose rollouts will probably differ in reward."""
    sampling: str = "independent"
    """How the rollouts of a group are sampled: `independent`, each from the task's beginning, or in a way that a plugin adds.
    `tree` samples some from the beginning (`trunks`), and spends the rest of the group's tokens on branches of these, for the
    credit `branch`. `prefix` lets groups of tasks that nearly always fail or succeed begin inside earlier rollouts."""
    policy_fault: float | Literal["mask", "exclude"] = 0.0
    """How training treats a rollout that failed by the model's own fault (an invented tool, an endless answer, ...). A number
    is its reward. `mask` compares the other rollouts with it as with a reward of 0, but does not train its calls. `exclude`
    leaves it out of its group."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between evaluations on the held-out tasks. Evaluations before the first and after the last step always run;
    0 runs only those."""
    keep: Literal["last", "best"] = "last"
    """The model that the run exports at its end: that of its `last` step, or of its `best` held-out evaluation, where failed
    rollouts count as 0."""
    patience: int = Field(default=0, ge=0)
    """Number of evaluations in a row without a new best after which the run ends early; 0 never ends it early."""
    eval_temperature: float | None = Field(default=None, ge=0.0)
    """Sampling temperature of evaluations; null keeps the agent's own."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints of the training state, in the run's folder; a resumed run replays the steps since the last one
    from the store. null writes one when training since the last has taken ten times as long as writing it took; with verl after
    each step, because restarted workers continue from it. The last step is always saved, and so is the step at which a run is
    stopped. Without the plugin `proof`, which replays steps, each step that changed the weights is saved before its commit, and
    a number above 1 is refused."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints kept on disk."""
    seed: int = 0
    """Seed of the task order, the sampler and the engine."""
    trackers: tuple[str, ...] | None = None
    """Trackers that receive the metrics, in addition to the store: `jsonl`, `tensorboard`, `otel`, `wandb`, `mlflow`,
    `trackio`, or a plugin's. null is `jsonl`, `tensorboard` and others that plugins register as defaults."""
    stage_order: tuple[str, ...] = ()
    """The order of plugins' stages at a step, by their names, first to last. It is needed if two stages stand at the same point
    and neither says which comes first."""
    max_logprob_gap: float | None = Field(default=None, gt=0)
    """Warn when |trainer - sampler| (nats) exceeds this on any token of a step without stale tokens. When the probe after an
    update exceeds it, the weights are sent again; the run ends if vLLM still does not serve them. null is a limit by the dtype:
    0.001 on any token with float32; 0.05 in the mean and 0.6 on 99.9 % of the tokens with bfloat16."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), by peft."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter."""


StepKind = Literal["auto", "tree", "linear", "per-call"]


class EngineConfig(Section):
    """The engine, which holds and trains the weights."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and computation. `auto` takes `policy_server.dtype` where that is set, else the type chosen for
    both (see there). With an attached vLLM, `auto` is float32 on a CPU and bfloat16 on a GPU."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    threads: int = Field(default=1, ge=0)
    """torch threads on a CPU; 0 keeps torch's default. One is fastest when a policy server uses the same cores."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Maximum of padded tokens per forward and backward pass. A tree step on a CPU is also limited to 1.25 GiB of
    activations."""
    lr: float | None = Field(default=None, gt=0)
    """AdamW's learning rate; null takes one by the size of the model, ten times that with `lora` (`lightning train --lr`)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Upper limit of the gradient's global norm; larger gradients are clipped."""
    max_nonfinite_steps: int = Field(default=3, ge=0)
    """Number of consecutive steps that may be skipped because a loss or gradient is not finite; one more ends the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up of the learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: `constant`, or falling until the last of `trainer.steps`, in a line or by half a
    cosine. It changes by steps, not by updates within a step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` at which a falling learning rate ends."""
    minibatches: int = Field(default=1, ge=1)
    """Parts into which a step's rows are dealt; each gets an optimizer update of its own. Rows stay whole."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's rows. From the second update on, the tokens were sampled by an older policy, which losses with
    a clipped ratio (`grpo`, `ppo`) allow for."""
    step: StepKind = "auto"
    """How rows are computed: `tree` (each shared prefix once), `linear` (merged rows), `per-call` (one row per call) or
    `auto` (a tree where the model supports it and enough is shared). All give the same gradient; the metric `tree` shows
    which was used."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""


class PolicyServerConfig(Section):
    """vLLM: a process started by lightning, or a running server."""

    attach: str | tuple[str, ...] = ""
    """Root URL of a running vLLM to attach to, which the plugin `attach` does; empty starts one. Several URLs, which need the
    plugin `replicas`, are servers of one policy."""
    placement: str = ""
    """Where lightning starts vLLM: empty is this machine; the plugin `ray` has `ray`, the nodes of a Ray cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device profile (arguments and environment) of a server that lightning starts."""
    host: str = "127.0.0.1"
    """Address of a server that lightning starts. Loopback, since agents are to reach the model through the gateway."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of a server that lightning starts; 0 takes a free one."""
    gpus: tuple[int, ...] = ()
    """GPUs of a server that lightning starts, by their numbers among the visible ones; empty takes the first ones. Leave out
    the trainer's (`engine.device`), so that both compute at once."""
    dtype: str = "auto"
    """vLLM's dtype. `auto` takes `engine.dtype` where that is set, else one type is chosen for both: bfloat16 on CUDA,
    bfloat16 for models of 50 M parameters or more on a CPU that is faster in bfloat16, else float32."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of prompt plus response, in tokens; null is the model's context length, limited by the KV cache. With
    positions that are scaled for longer texts (longrope, dynamic) null is the length before scaling."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache. null computes it from the model's size and `runner.concurrency` on a CPU; on CUDA it is what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Fraction of the GPU's memory for a CUDA server; the trainer needs the rest."""
    tool_call_parser: str = "auto"
    """vLLM's parser for tool calls. `auto` takes that of the model's family if its chat template supports tools; empty
    turns tool calling off."""
    reasoning_parser: str = "auto"
    """vLLM's parser for reasoning. `auto` takes that of the model's family if its chat template needs one; empty is
    none."""
    args: tuple[str, ...] = ()
    """Further arguments for `vllm serve`, passed unchanged."""
    start_timeout: float | None = Field(default=None, gt=0)
    """Time limit in seconds until a server answers. null is 300 on a CPU and 1800 on CUDA, plus one for each 100 MB of
    weights."""
    weight_transfer: str = "auto"
    """How vLLM gets new weights: `file` (in the run's folder), `shared_memory` (in /dev/shm, 2.2 times the size of the weights)
    or a plugin's: that of `attach` has `gloo` (TCP) and `nccl`. `auto` is shared memory where it has room and lightning started
    vLLM, else a file."""
    transfer_timeout: float = Field(default=600.0, gt=0)
    """Time limit in seconds for a weight transfer."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether vLLM is no process that lightning starts on this machine."""
        return bool(self.attach or self.placement)


class GatewayConfig(Section):
    """The OpenAI-compatible endpoint that agents call."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    token_ttl: float = Field(default=3600.0, gt=0)
    """Seconds for which a rollout's API key is valid."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Maximum size of a request body; larger requests get status 413."""
    hold_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a request may wait during a weight update; then it gets status 503."""
    upstream_timeout: float = Field(default=600.0, gt=0)
    """Seconds without a byte from vLLM before the gateway checks vLLM's health. The call fails if vLLM does not answer that
    check within the same time."""
    override_sampling: dict[str, float | int] = Field(default_factory=dict)
    """Sampling parameters that replace those of every request; empty keeps the agents' own."""
    seed_calls: bool = False
    """Give each call without a `seed` one computed from trainer.seed, the rollout's position in the run and the call's
    number."""
    allowed_upstreams: tuple[str, ...] = ("loopback", "private")
    """Hosts of policy servers that other processes may register: `loopback`, `private` (private networks), networks
    (`203.0.113.0/24`) and names (`gpu-*.example.org`). A policy server given to this process is always allowed."""
    limits: LimitsConfig = LimitsConfig()
    """Limits for each client of the port."""
    stage_order: tuple[str, ...] = ()
    """The order of plugins' stages in a call, as `trainer.stage_order`."""


class RunnerConfig(Section):
    """Where and how agents run."""

    concurrency: int = Field(default=32, ge=1)
    """Number of agents that run at once; the process runner keeps one process for each."""
    timeout: float = Field(default=300.0, gt=0)
    """Time limit of one rollout, in seconds."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts per rollout; only infrastructure failures are retried."""
    lease_ttl: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life from a runner before its rollouts go to another runner."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that agents of a `lightning runner` get to finish after SIGTERM or Ctrl-C. Then their rollouts are
    returned to the queue."""
    adapters: tuple[str, ...] | None = None
    """Adapters to install in the agents' processes; null installs all that are found."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Prompt templates that replace the agents' own, by the name of the `component` that has the prompt. Each is a text,
    or a version of a resource as `resource:NAME@ALIAS` (in another store `resource:PLACE#NAME@ALIAS`)."""
    reroute: tuple[str, ...] = ()
    """Hosts whose calls go to the policy instead, for agents with a provider's address in their code (`api.openai.com`)."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports once, so that new processes start faster."""
    seed_agents: bool = True
    """Seed `random`, numpy, torch and `uuid.uuid4` in agents' processes, so that a repeated run draws the same numbers and
    siblings draw others. If false, the seeds are random. The runner `inline` seeds nothing."""
    rollouts_per_process: int = Field(default=1, ge=1)
    """Number of rollouts after which a worker process is replaced. With 1 no rollout sees what another left in the memory of
    modules. A larger number saves the fork of a process for each rollout."""
    sandbox_hidden: tuple[str, ...] = ("runs",)
    """Files and folders of the project that agents in a sandbox (also of a task in Harbor's format) may not read: by default
    the runs, which hold the store and its secrets."""
    stage_order: tuple[str, ...] = ()
    """The order of plugins' stages around an attempt, as `trainer.stage_order`."""


class Config(Section):
    """All settings. Arguments and `--set` win over `LIGHTNING_*` variables, and these over the TOML file."""

    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    policy_server: PolicyServerConfig = PolicyServerConfig()
    gateway: GatewayConfig = GatewayConfig()
    runner: RunnerConfig = RunnerConfig()
