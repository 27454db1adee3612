"""The memory that a training step and vLLM take on GPUs on which nothing was measured: formulas, each with its source.

The invariant: memory is in bytes for one GPU, at the moment of the step that needs most of it; nothing that is shared by
ranks is counted whole on each, and nothing that every rank needs whole is divided.

    what a rank keeps: weights, gradients, two moments, float32 each (ZeRO, arXiv 1910.02054, with all of it sharded), but
    gradients whole where verl exchanges them only after the last micro-batch, as it does unless told otherwise
    what it makes for a while: weights of the layers at hand as they are computed with (FSDP2: two, and the embedding and
    output layer)
    activations: what the backward pass needs of each layer, counted from the layer's own operations as arXiv 2205.05198
    does, without attention scores (flash attention keeps none); with checkpointing each layer's input, and one layer whole
    KV cache: 2 x layers x key heads x their size, for each token (arXiv 2309.06180), in what vLLM's share leaves
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.config import EngineConfig
from lightning.errors import ConfigError
from lightning_verl.config import VerlConfig

from lightning_planner.cluster import Cluster
from lightning_planner.shape import Shape

HALF, FULL = 2, 4
"""Bytes of a bfloat16 and a float32."""
CHUNK = 1 << 28
"""Bytes of the engines' table of logits (`lightning.engines.logprobs`), which becomes their gradient in place."""

COUNTED = frozenset(
    {
        "model_dtype",
        "fsdp_size",
        "use_no_sync_for_gradient_accumulation",
        "ulysses_sequence_parallel_size",  # a micro-batch grows with it, and a GPU's part of it stays the same
    }
)
"""Options of `engine.verl.sharding` whose memory is counted."""


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory on one GPU, in bytes; `how` says what it is computed from."""

    name: str
    bytes: float
    how: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The uses of memory on a GPU with one `role` (`training`, `serving`, or both), which has `available` bytes."""

    role: str
    items: tuple[Item, ...]
    available: float

    @property
    def used(self) -> float:
        """The sum of all uses, in bytes."""
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether all uses fit into the available memory."""
        return self.used <= self.available


def memory(shape: Shape, cluster: Cluster, engine: EngineConfig, share: float) -> list[Memory]:
    """Return the memory of each kind of GPU in the cluster. `share` is `policy_server.gpu_memory_utilization`.

    Raises `ConfigError` for an engine whose memory cannot be counted.
    """
    overhead = Item("overhead", cluster.assumptions.overhead, "assumed")
    served = serving_items(shape, cluster, share)
    trained = training_items(shape, cluster.training, engine)
    if cluster.shared:
        return [Memory("training and serving", (*trained, *served, overhead), cluster.gpu.memory)]
    return [
        Memory("training", (*trained, overhead), cluster.gpu.memory),
        Memory("serving", tuple(served), cluster.gpu.memory),
    ]


def uncounted(engine: EngineConfig, ranks: int) -> list[str]:
    """Return notes on the engine's settings that a plan for this many training GPUs does not count."""
    notes = []
    if ranks > 1:
        names = [f"engine.verl.sharding.{name}" for name in VerlConfig.of(engine).sharding if name not in COUNTED]
        names += [f"engine.verl.model.{name}" for name in VerlConfig.of(engine).model]
        if names:
            notes.append(f"what {', '.join(names)} changes is not counted")
    if engine.epochs * engine.minibatches > 1:
        notes.append(
            f"engine.epochs = {engine.epochs}, engine.minibatches = {engine.minibatches}: training is timed as one pass with "
            "one update, so it takes longer"
        )
    if engine.dtype == "float32":
        notes.append(
            "engine.dtype = float32: its memory is counted, but training is timed at the bfloat16 peak, so it takes longer"
        )
    return notes


def ranks_of(engine: EngineConfig) -> int:
    """Return the number of GPUs that verl trains on with these settings, at least 1."""
    return max(VerlConfig.of(engine).world_size, 1)


def serving_items(shape: Shape, cluster: Cluster, share: float) -> list[Item]:
    """Return vLLM's uses of memory on each GPU: always its whole share, of which the KV cache gets the rest."""
    over = f" / {cluster.server_gpus}" if cluster.server_gpus > 1 else ""
    whole, weights = share * cluster.gpu.memory, HALF * shape.parameters / cluster.server_gpus
    tokens = max(0.0, kv_tokens(shape, cluster, share))
    each = _kv_bytes(shape, cluster)
    cache = tokens * each / cluster.server_gpus
    return [
        Item("vLLM: weights", weights, f"2 bytes x {shape.parameters:.3g}{over}"),
        Item("vLLM: KV cache", cache, f"{tokens:.3g} tokens x {each:.0f} bytes{over}"),
        Item("vLLM: passes", max(0.0, whole - weights - cache), f"the rest of gpu_memory_utilization = {share:g}"),
    ]


def training_items(shape: Shape, ranks: int, engine: EngineConfig) -> list[Item]:
    """Return training's uses of memory on each of `ranks` GPUs: those of the torch engine on one, of verl's FSDP2 on more.

    Raises `ConfigError` for Megatron, and for an invalid option of verl.
    """
    size = FULL if engine.dtype == "float32" else HALF
    tokens, checkpointing = engine.tokens_per_microbatch, engine.gradient_checkpointing
    if ranks > 1:
        items, master = _sharded(shape, ranks, engine, size), False
    else:
        items, master = _alone(shape, engine, size), size == HALF
    most, how = min(CHUNK, size * tokens * shape.vocabulary), "at most 256 MiB at one time"
    if ranks > 1 and engine.lora is None:
        most, how = most + (FULL + size) * shape.embedding, f"{how}; float32 sum and a part of the layer's gradient"
    logits = Item("logits", most, how)
    return [*items, _activations(shape, tokens, size, checkpointing=checkpointing, master=master), logits]


def _alone(shape: Shape, engine: EngineConfig, size: int) -> list[Item]:
    """Return the weights, gradients and moments of the torch engine, which computes in numbers of `size` bytes."""
    parameters = shape.parameters
    if engine.lora is not None:
        learned = shape.adapters(engine.lora.rank)
        how = f"{size} bytes x {parameters:.3g} + 4 x {learned:.3g} of adapters"
        return [Item("weights", size * parameters + FULL * learned, how), *_learned(learned, FULL)]
    items = [Item("weights", FULL * parameters, f"4 bytes x {parameters:.3g}"), *_learned(parameters, FULL)]
    if size == HALF:
        how = "autocast keeps a bfloat16 copy of each matrix for the pass"
        items.append(Item("layers at hand", HALF * parameters, how))
    return items


def _sharded(shape: Shape, ranks: int, engine: EngineConfig, size: int) -> list[Item]:
    """Return the weights, gradients and moments of verl's FSDP2, which computes in numbers of `size` bytes."""
    if VerlConfig.of(engine).strategy == "megatron":
        raise ConfigError(
            "engine.verl.strategy = megatron cuts the model in other ways than a plan can count: plan for FSDP2 with "
            "--set engine.verl.strategy=fsdp2"
        )
    options = VerlConfig.of(engine).sharding
    kept, group = _kept(options.get("model_dtype")), options.get("fsdp_size")
    over = group if isinstance(group, int) and 0 < group < ranks else ranks
    adapters = 0 if engine.lora is None else shape.adapters(engine.lora.rank)
    weights, learned = shape.parameters + adapters, adapters or shape.parameters
    # verl's default: gradients stay whole, in float32, until the last micro-batch's are exchanged.
    whole = options.get("use_no_sync_for_gradient_accumulation", True)
    ends = shape.embedding * (1 if shape.tied else 2)
    gathered = size * (ends + 2 * shape.layer) + FULL * max(ends, shape.layer)
    return [
        Item("weights", kept * weights / over, f"{kept} bytes x {weights:.3g} / {over}"),
        *_learned(learned, kept, over, whole=bool(whole)),
        Item("layers at hand", gathered, f"{size} bytes of two layers and both ends; float32 of the largest gradient"),
    ]


def _learned(learned: int, kept: int, over: int = 1, *, whole: bool = False) -> list[Item]:
    """Return gradients and moments of `learned` weights, kept in `kept` bytes each and divided by `over` ranks; with `whole`
    each rank has all gradients."""
    by = f" / {over}" if over > 1 else ""
    gradients = Item("gradients", kept * learned / over, f"{kept} bytes x {learned:.3g}{by}")
    if whole:
        how = f"4 bytes x {learned:.3g}, whole between micro-batches (use_no_sync_for_gradient_accumulation)"
        gradients = Item("gradients", FULL * learned, how)
    return [gradients, Item("AdamW's moments", 2 * kept * learned / over, f"{2 * kept} bytes x {learned:.3g}{by}")]


def _kept(dtype: object) -> int:
    """Return the bytes in which verl keeps a weight, by its name of the dtype. Raises `ConfigError` for an unknown name."""
    if dtype in (None, 32, "32", "fp32", "float32"):
        return FULL
    if dtype in (16, "16", "fp16", "float16", "bf16", "bfloat16"):
        return HALF
    raise ConfigError(f"engine.verl.sharding.model_dtype = {dtype!r} is no dtype of verl's: use fp32 or bf16")


def layer_activations(shape: Shape, *, master: bool, size: int = HALF) -> int:
    """Return the bytes per token that one layer keeps for the backward pass, computed in numbers of `size` bytes with flash
    attention.

    `master` says that weights are float32 and computed in bfloat16 under autocast, as the torch engine does on one GPU: the
    hidden states between layers are then float32, and the input of each matrix is a separate copy. The numbers are those of the
    tensors that autograd saves in transformers' Llama and Qwen3 (which also normalises each head).
    """
    # Two norms keep their input and its normalised copy; q, k, v, gate and up keep their input.
    hidden = (2 * (FULL + FULL) + 5 * size if master else 2 * (FULL + size + size)) * shape.hidden
    # Queries and keys as they are attended, values, attention's output, and the log of each head's sum.
    attention = 2 * size * (shape.queries + shape.keys) + FULL * shape.heads
    norms = (FULL + size) * (shape.queries + shape.keys) + FULL * (shape.heads + shape.kv_heads)
    # Gate, its activation, up, and their product.
    forward = 4 * size * shape.used * shape.intermediate
    return hidden + attention + forward + (norms if shape.head_norms else 0)


def _activations(shape: Shape, tokens: int, size: int, *, checkpointing: bool, master: bool) -> Item:
    layer = layer_activations(shape, master=master, size=size)
    if not checkpointing:
        return Item(
            "activations", tokens * shape.layers * layer, f"{tokens} tokens x {shape.layers} layers x {layer} bytes"
        )
    kept = (FULL if master else size) * shape.hidden
    return Item(
        "activations",
        tokens * (shape.layers * kept + layer),
        f"{tokens} tokens x ({shape.layers} layers x {kept} bytes + {layer} of one layer)",
    )


def kv_tokens(shape: Shape, cluster: Cluster, share: float, max_tokens: int = 8192) -> float:
    """Return the tokens that the policy server's KV cache holds: vLLM's share of its GPUs, without the weights and the
    activations of `max_tokens` in one iteration (logits included). Negative where nothing is left."""
    whole = share * cluster.gpu.memory * cluster.server_gpus
    passing = (
        HALF * max_tokens * (2 * shape.hidden + shape.queries + 2 * shape.keys + 2 * shape.used * shape.intermediate)
    )
    sampling = FULL * cluster.assumptions.max_calls * shape.vocabulary * 2
    left = whole - HALF * shape.parameters - passing - sampling
    return left / _kv_bytes(shape, cluster)


def _kv_bytes(shape: Shape, cluster: Cluster) -> float:
    """Return the bytes of a token's keys and values on all GPUs of the policy server. With more GPUs than key heads some heads
    are stored more than once."""
    return HALF * shape.kv_elements * max(1.0, cluster.server_gpus / shape.kv_heads)
