"""The verl engine: many GPUs, FSDP2 or Megatron, over Ray; the same code on CPUs with gloo."""
