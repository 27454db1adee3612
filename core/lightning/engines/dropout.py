"""Dropout of a model that is trained.

The invariant: the same tokens always have the same logprobs, whatever the model's configuration says of noise.
"""

from __future__ import annotations

from torch import nn


def silence_dropout(model: nn.Module) -> None:
    """A policy is trained as it was sampled from: without noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
