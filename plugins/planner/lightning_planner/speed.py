"""The speed of GPUs on which nothing was measured: the seconds of serving and training, from formulas, each with its source.

The invariant: every term of a cost is operations or bytes divided by a peak times an assumed share of it, and terms that could
overlap are added, so that an estimate is rather too slow than too fast.

    decoding: each iteration reads the weights once and every sequence's keys and values (arXiv 2309.06180)
    several GPUs of one server: two sums over them in each layer (arXiv 1909.08053), each of which sends 2 (n - 1) / n of a
    token's hidden state in bfloat16 over a GPU's link (a ring)
    a token forward: 2 operations for each parameter it is multiplied with; backward twice that (arXiv 2001.08361), and one
    forward more where layers are checkpointed, and for each pass that the algorithm makes before the gradient's; attention
    adds 4 x layers x width x tokens before it, which are half a row in the mean
"""

from __future__ import annotations

import math

from lightning.config import EngineConfig
from lightning.errors import ConfigError

from lightning_planner.cluster import Cluster
from lightning_planner.costs import ServerCosts, TrainerCosts
from lightning_planner.memory import FULL, HALF, kv_tokens
from lightning_planner.shape import Shape

STATE = 3 * FULL
"""Bytes of a checkpoint for each trained parameter: the weight and two moments in float32."""
TRAFFIC = 7 * FULL
"""Bytes that AdamW reads and writes for each parameter: the gradient is read; weight and two moments are read and written."""


def server_costs(shape: Shape, cluster: Cluster, share: float, context: float) -> ServerCosts:
    """Return a policy server's costs at a mean `context` of tokens in a sequence.

    Raises `ConfigError` when the model does not fit into vLLM's share of the memory, or its heads cannot be divided among the
    GPUs.
    """
    gpu, assumed, together = cluster.gpu, cluster.assumptions, cluster.server_gpus
    able = dividing(shape, cluster.gpus if cluster.shared else cluster.gpus - 1)
    if together not in able:
        raise ConfigError(
            f"vLLM cannot divide the {shape.heads} heads and {shape.kv_heads} key heads of {shape.name} among "
            f"{together} GPUs: give {_option(cluster)} as one of {', '.join(map(str, able))}"
        )
    room = kv_tokens(shape, cluster, share)
    if room < context:
        raise ConfigError(
            f"{shape.name} leaves vLLM no room for a KV cache in {share:.0%} of {together} x {gpu.name}: raise "
            f"policy_server.gpu_memory_utilization, or {_option(cluster)}"
        )
    traffic = together * gpu.bandwidth * assumed.bandwidth_share
    operations = together * gpu.flops * assumed.prompt_mfu
    forward = 2.0 * shape.computed / operations
    sums = 2.0 * shape.layers
    sent = sums * 2 * (together - 1) / together * HALF * shape.hidden / cluster.link(together)
    return ServerCosts(
        token=HALF * shape.parameters / traffic
        + assumed.iteration_seconds
        + (sums * assumed.exchange_seconds if together > 1 else 0.0),
        token_per_call=forward + sent + HALF * shape.kv_elements * context / traffic + assumed.sequence_seconds,
        prompt_token=forward + sent,
        latency=assumed.call_seconds,
        max_calls=assumed.max_calls,
        kv_tokens=room,
    )


def dividing(shape: Shape, most: int) -> list[int]:
    """Return the numbers of GPUs up to `most` among which vLLM can divide a model: all must have equally many heads, and no key
    head may be split."""
    return [
        number
        for number in range(1, min(shape.heads, most) + 1)
        if not shape.heads % number and (not shape.kv_heads % number or not number % shape.kv_heads)
    ]


def _option(cluster: Cluster) -> str:
    return "policy_server.gpus_each" if cluster.shared or cluster.gpus_each else "--serve-on"


def trainer_costs(
    shape: Shape, cluster: Cluster, engine: EngineConfig, length: float, forward_passes: int = 0
) -> TrainerCosts:
    """Return training's costs for rows of a mean `length` of tokens, each of which has `forward_passes` before its gradient's
    own pass."""
    gpu, assumed, ranks = cluster.gpu, cluster.assumptions, cluster.training
    passes = (4.0 if engine.gradient_checkpointing else 3.0) + forward_passes
    operations = passes * (2.0 * shape.computed + 2.0 * shape.layers * shape.queries * length)
    computing = operations / (ranks * gpu.flops * assumed.train_mfu)
    # A micro-batch of every rank gathers the weights twice and scatters the gradients once; it overlaps with computing. In a
    # forward pass alone they are gathered once.
    exchanged = ((2 + forward_passes) * HALF + FULL) * shape.parameters * (ranks - 1) / ranks
    sharding = exchanged / cluster.exchange / (ranks * engine.tokens_per_microbatch)
    learned = shape.parameters if engine.lora is None else shape.adapters(engine.lora.rank)
    # Adapters are handed over alone, and the server reads the weights of the model's folder to merge them.
    written = HALF * shape.parameters if engine.lora is None else FULL * learned
    read = HALF * shape.parameters + (0 if engine.lora is None else written)
    machines = math.ceil(ranks / assumed.gpus_per_machine)
    return TrainerCosts(
        step=TRAFFIC * learned / ranks / (gpu.bandwidth * assumed.bandwidth_share),
        row_token=max(computing, sharding),
        checkpoint=STATE * learned / (machines * assumed.files),
        update=(written + read) / assumed.files,
        export=written / assumed.files,
    )
