"""The torch engine, which trains in one process on a CPU or one CUDA device."""
