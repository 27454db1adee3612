"""The verl engine: training on many GPUs over Ray, by FSDP2 or Megatron. The same code runs on CPUs with gloo."""
