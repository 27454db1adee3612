"""Recipes for several GPUs: real models on real data, by the verl engine. None was run: no GPU was at hand."""
