"""Costs on GPUs that nothing was measured on: operations and bytes, by what the data sheet allows of them.

The invariant: every term is operations or bytes divided by a peak times an assumed share of it, and terms that could overlap
are added, so that an estimate is rather too slow than too fast.

    decoding: each iteration reads the weights once and every sequence's keys and values (arXiv 2309.06180)
    a token forward: 2 operations for each parameter it is multiplied with; backward twice that (arXiv 2001.08361), and one
    forward more where layers are checkpointed; attention adds 4 x layers x width x tokens before it, of which half are
"""

from __future__ import annotations

import math

from lightning.config import EngineConfig
from lightning.errors import ConfigError
from lightning.planning.cluster import Cluster
from lightning.planning.costs import ServerCosts, TrainerCosts
from lightning.planning.memory import FULL, HALF, kv_tokens
from lightning.planning.shape import Shape

STATE = 3 * FULL
"""Bytes of a checkpoint for each learned parameter: the weight and two moments in float32."""
TRAFFIC = 7 * FULL
"""Bytes that AdamW reads and writes for each parameter: gradient, weight and two moments, the last three both ways."""


def server_costs(shape: Shape, cluster: Cluster, share: float, context: float) -> ServerCosts:
    """A policy server's costs at a mean `context` of tokens in a sequence.

    Raises `ConfigError` when the model does not fit into vLLM's share of the memory.
    """
    gpu, assumed, together = cluster.gpu, cluster.assumptions, cluster.tensor_parallel
    room = kv_tokens(shape, cluster, share)
    if room < context:
        raise ConfigError(
            f"{shape.name} leaves vLLM no room for a KV cache in {share:.0%} of {together} x {gpu.name}: raise "
            "policy_server.gpu_memory_utilization, --tensor-parallel, or --serve-on"
        )
    traffic = together * gpu.bandwidth * assumed.bandwidth_share
    operations = together * gpu.flops * assumed.prompt_mfu
    forward = 2.0 * shape.computed / operations
    return ServerCosts(
        token=HALF * shape.parameters / traffic + assumed.iteration_seconds,
        token_per_call=forward + HALF * shape.kv_elements * context / traffic,
        prompt_token=forward,
        latency=assumed.call_seconds,
        max_calls=assumed.max_calls,
        kv_tokens=room,
    )


def trainer_costs(shape: Shape, cluster: Cluster, engine: EngineConfig, length: float) -> TrainerCosts:
    """Training's costs for rows of a mean `length` of tokens."""
    gpu, assumed, ranks = cluster.gpu, cluster.assumptions, cluster.training
    passes = 4.0 if engine.gradient_checkpointing else 3.0
    operations = passes * (2.0 * shape.computed + 2.0 * shape.layers * shape.queries * length)
    computing = operations / (ranks * gpu.flops * assumed.train_mfu)
    # A micro-batch of every rank gathers the weights twice and scatters the gradients once; it overlaps with computing.
    exchanged = (2 * HALF + FULL) * shape.parameters * (ranks - 1) / ranks
    sharding = exchanged / cluster.exchange / (ranks * engine.tokens_per_microbatch)
    learned = shape.parameters if engine.lora is None else shape.adapters(engine.lora.rank)
    machines = math.ceil(ranks / assumed.gpus_per_machine)
    return TrainerCosts(
        step=TRAFFIC * learned / ranks / (gpu.bandwidth * assumed.bandwidth_share),
        row_token=max(computing, sharding),
        checkpoint=STATE * learned / (machines * assumed.files),
        update=2 * HALF * shape.parameters / assumed.files,  # written by the trainer, read by the servers
        export=HALF * shape.parameters / assumed.files,
    )
