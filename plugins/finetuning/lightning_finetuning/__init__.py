"""Fine-tuning on an agent's own rollouts: imitate the best ones (SFT), prefer better ones to worse (DPO), or correct each token
by a teacher (distillation)."""
