"""Fine-tuning on an agent's own rollouts: those that did well are imitated (SFT), or preferred to others (DPO), or
corrected token by token by a teacher (distillation)."""
