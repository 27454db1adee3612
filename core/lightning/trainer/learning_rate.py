"""The learning rate of a run that names none: by the size of its model, and by whether all weights or adapters are trained.

The invariant: what is chosen stands in the run's settings as if it had been given, and is said at the start.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from lightning.config import Config
from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import folder_tensors

RATES: Final = ((3e6, 2e-3), (60e6, 8e-5), (400e6, 1e-5), (2e9, 5e-6), (10e9, 2e-6), (math.inf, 1e-6))
"""Up to how many parameters which rate, with all weights trained; docs/configuration.md names the source of each."""
ADAPTER_RATE_FACTOR: Final = 10.0
"""How many times as fast adapters learn best (Schulman et al., LoRA Without Regret, 2025)."""


def default_rate(config: Config, model: Path) -> tuple[float, str]:
    """The rate for the model in a folder, and why it is that. One whose size cannot be read gets that of the largest."""
    try:
        size = float(sum(math.prod(spec.shape) for spec in folder_tensors(model).values())) or math.inf
    except PolicyServerError:  # whoever loads it says what is wrong
        size = math.inf
    rate = next(rate for most, rate in RATES if size <= most)
    trained = "all weights"
    if config.engine.lora is not None:
        rate, trained = rate * ADAPTER_RATE_FACTOR, "adapters"
    of = f"with {size / 1e6:,.3g} M parameters" if math.isfinite(size) else "whose size cannot be read"
    return rate, f"the default for training {trained} of a model {of}"
