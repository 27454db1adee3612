"""Memory of each GPU: formulas, each with where it is from.

The invariant: everything is in bytes for one GPU, at the moment of the step that needs most of it; nothing that is shared by
ranks is counted whole on each, and nothing that every rank needs whole is divided.

    what a rank keeps: weights, gradients, two moments, float32 each (ZeRO, arXiv 1910.02054, with all of it sharded)
    what it makes for a while: bfloat16 weights of the layers at hand (FSDP2: two, and the embedding and output layer)
    activations: what the backward pass needs of each layer, counted from the layer's own operations as arXiv 2205.05198
    does, without attention scores (flash attention keeps none); with checkpointing each layer's input, and one layer whole
    KV cache: 2 x layers x key heads x their size, for each token (arXiv 2309.06180), in what vLLM's share leaves
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning.config import EngineConfig
from lightning.planning.cluster import Cluster
from lightning.planning.shape import Shape

HALF, FULL = 2, 4
"""Bytes of a bfloat16 and a float32."""
CHUNK = (1 << 26) * FULL
"""The torch engine's logits at once (`lightning.engines.torch.logprobs`): scores, log p and their gradient, each this much."""


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory on one GPU, in bytes, and what it is computed from."""

    name: str
    bytes: float
    how: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The uses on a GPU of one kind (`training`, `serving`, or both) of its `available` bytes."""

    role: str
    items: tuple[Item, ...]
    available: float

    @property
    def used(self) -> float:
        """Bytes of all of it."""
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.used <= self.available


def memory(shape: Shape, cluster: Cluster, engine: EngineConfig, share: float) -> list[Memory]:
    """The memory of each kind of GPU in the cluster; `share` is `policy_server.gpu_memory_utilization`."""
    overhead = Item("overhead", cluster.assumptions.overhead, "assumed")
    served = serving_items(shape, cluster, share)
    trained = training_items(shape, cluster.training, engine)
    if cluster.shared:
        return [Memory("training and serving", (*trained, *served, overhead), cluster.gpu.memory)]
    return [
        Memory("training", (*trained, overhead), cluster.gpu.memory),
        Memory("serving", tuple(served), cluster.gpu.memory),
    ]


def serving_items(shape: Shape, cluster: Cluster, share: float) -> list[Item]:
    """What vLLM takes of each GPU: its share, whatever it needs; the KV cache is what the rest leaves."""
    over = f" / {cluster.tensor_parallel}" if cluster.tensor_parallel > 1 else ""
    whole, weights = share * cluster.gpu.memory, HALF * shape.parameters / cluster.tensor_parallel
    tokens = max(0.0, kv_tokens(shape, cluster, share))
    each = HALF * shape.kv_elements
    cache = tokens * each / cluster.tensor_parallel
    return [
        Item("vLLM: weights", weights, f"2 bytes x {shape.parameters:.3g}{over}"),
        Item("vLLM: KV cache", cache, f"{tokens:.3g} tokens x {each} bytes{over}"),
        Item("vLLM: passes", max(0.0, whole - weights - cache), f"the rest of gpu_memory_utilization = {share:g}"),
    ]


def training_items(shape: Shape, ranks: int, engine: EngineConfig) -> list[Item]:
    """What training takes on each of so many GPUs: the torch engine's on one, FSDP2's on more."""
    parameters = shape.parameters
    learned = parameters if engine.lora is None else shape.adapters(engine.lora.rank)
    over = f" / {ranks}" if ranks > 1 else ""
    items = []
    if engine.lora is None:
        items.append(Item("weights", FULL * parameters / ranks, f"4 bytes x {parameters:.3g}{over}"))
    else:
        frozen = HALF * parameters + FULL * learned
        items.append(
            Item("weights", frozen / ranks, f"(2 bytes x {parameters:.3g} + 4 x {learned:.3g} of adapters){over}")
        )
    items.append(Item("gradients", FULL * learned / ranks, f"4 bytes x {learned:.3g}{over}"))
    items.append(Item("AdamW's moments", 2 * FULL * learned / ranks, f"8 bytes x {learned:.3g}{over}"))
    ends = shape.embedding * (1 if shape.tied else 2)
    if ranks > 1:
        gathered = HALF * (ends + 2 * shape.layer) + FULL * max(ends, shape.layer)
        items.append(
            Item("layers at hand", gathered, "bfloat16 of two layers and both ends; float32 of the largest gradient")
        )
    elif engine.lora is None:
        items.append(
            Item("layers at hand", HALF * parameters, "autocast keeps a bfloat16 copy of each matrix for the pass")
        )
    tokens = engine.tokens_per_microbatch
    items.append(_activations(shape, tokens, checkpointing=engine.gradient_checkpointing, master=ranks == 1))
    items.append(_logits(shape, tokens, ranks))
    return items


def layer_activations(shape: Shape, *, master: bool) -> int:
    """Bytes that one layer keeps for each token until the backward pass, in bfloat16 under flash attention.

    `master` says that weights are float32 and computed in bfloat16 under autocast, as the torch engine does on one GPU: the
    hidden states between layers are then float32, and what goes into each matrix is a copy of its own. The numbers are those
    of the tensors that autograd saves in transformers' Llama and Qwen3 (which also normalises each head).
    """
    # Two norms keep their input and its normalised copy; q, k, v, gate and up what they are given.
    hidden = (2 * (FULL + FULL) + 5 * HALF if master else 2 * (FULL + HALF + HALF)) * shape.hidden
    # Queries and keys as they are attended, values, attention's output, and the log of each head's sum.
    attention = 2 * HALF * (shape.queries + shape.keys) + FULL * shape.heads
    norms = (FULL + HALF) * (shape.queries + shape.keys) + FULL * (shape.heads + shape.kv_heads)
    # Gate, its activation, up, and their product.
    forward = 4 * HALF * shape.used * shape.intermediate
    return hidden + attention + forward + (norms if shape.head_norms else 0)


def _activations(shape: Shape, tokens: int, *, checkpointing: bool, master: bool) -> Item:
    layer = layer_activations(shape, master=master)
    if not checkpointing:
        return Item(
            "activations", tokens * shape.layers * layer, f"{tokens} tokens x {shape.layers} layers x {layer} bytes"
        )
    kept = (FULL if master else HALF) * shape.hidden
    return Item(
        "activations",
        tokens * (shape.layers * kept + layer),
        f"{tokens} tokens x ({shape.layers} layers x {kept} bytes + {layer} of one layer)",
    )


def _logits(shape: Shape, tokens: int, ranks: int) -> Item:
    if ranks == 1:
        return Item("logits", 3.0 * min(CHUNK, FULL * tokens * shape.vocabulary), "three chunks of 2^26 float32")
    each = 2 * HALF + FULL
    return Item(
        "logits", each * tokens * shape.vocabulary, f"{tokens} tokens x {shape.vocabulary} x {each} bytes (verl)"
    )


def kv_tokens(shape: Shape, cluster: Cluster, share: float, max_tokens: int = 8192) -> float:
    """Tokens that one policy server's KV cache holds: vLLM's share of its GPUs, without the weights and the activations of
    `max_tokens` in one iteration (logits included)."""
    whole = share * cluster.gpu.memory * cluster.tensor_parallel
    passing = (
        HALF * max_tokens * (2 * shape.hidden + shape.queries + 2 * shape.keys + 2 * shape.used * shape.intermediate)
    )
    sampling = FULL * cluster.assumptions.max_calls * shape.vocabulary * 2
    left = whole - HALF * shape.parameters - passing - sampling
    return left / (HALF * shape.kv_elements)
