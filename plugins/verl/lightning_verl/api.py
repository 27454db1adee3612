"""All names of verl that this package uses, in one place, because verl's worker API is young and its names move.

Importing this takes seconds. On a machine without an accelerator `device.choose` must have been called before.
"""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines that are not installed, and of names that Ray has moved
    from tensordict import TensorDict as TensorDict
    from verl.single_controller.ray import RayClassWithInitArgs as RayClassWithInitArgs
    from verl.single_controller.ray import RayResourcePool as RayResourcePool
    from verl.single_controller.ray import RayWorkerGroup as RayWorkerGroup
    from verl.single_controller.ray.base import sort_placement_group_by_node_ip as sort_placement_group_by_node_ip
    from verl.trainer.config import CheckpointConfig as CheckpointConfig
    from verl.utils.device import get_device_id as get_device_id
    from verl.utils.device import get_device_name as get_device_name
    from verl.utils.device import get_vendor as get_vendor
    from verl.utils.model import get_hf_auto_model_class as get_hf_auto_model_class
    from verl.utils.tensordict_utils import assign_non_tensor as assign_non_tensor
    from verl.utils.tensordict_utils import get_non_tensor_data as get_non_tensor_data
    from verl.utils.ulysses import get_ulysses_sequence_parallel_rank as get_ulysses_sequence_parallel_rank
    from verl.workers.config import FSDPEngineConfig as FSDPEngineConfig
    from verl.workers.config import FSDPOptimizerConfig as FSDPOptimizerConfig
    from verl.workers.config import HFModelConfig as HFModelConfig
    from verl.workers.config import McoreEngineConfig as McoreEngineConfig
    from verl.workers.config import McoreOptimizerConfig as McoreOptimizerConfig
    from verl.workers.config import TrainingWorkerConfig as TrainingWorkerConfig
    from verl.workers.config.optimizer import build_optimizer as build_optimizer
    from verl.workers.engine import EngineRegistry as EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as FSDPEngineWithLMHead
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker as TinkerTrainingWorker


def megatron_engine() -> Any:
    """Import and return verl's engine class over Megatron, which nothing else imports. Raises `ImportError` where it is not
    installed."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return MegatronEngineWithLMHead


def packed_for_megatron() -> Any:
    """Import and return verl's function that packs rows and cuts them over ranks for Megatron."""
    from verl.models.mcore.util import preprocess_thd_engine

    return preprocess_thd_engine
