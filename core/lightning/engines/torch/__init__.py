"""The torch engine: one process, a CPU or one CUDA device."""
