"""What the demonstrations share: how a model of a few hundred thousand weights is taught in minutes on two cores."""

from __future__ import annotations

import lightning

TINY: dict[str, object] = {
    "trainer.steps": 15,
    "trainer.tasks_per_step": 16,
    "trainer.eval_every": 0,
    # A thousand times a usual rate: the models have some 240 thousand weights, and every update is on-policy.
    "engine.lr": 2e-3,
    "engine.warmup_steps": 3,
}


def algorithm() -> lightning.LightningRL:
    """GRPO; every token counts the same, so that long rollouts teach as much per token as short ones."""
    return lightning.LightningRL("grpo", group_size=8, normalization="token-mean", clip_low=0.2, clip_high=0.28)
