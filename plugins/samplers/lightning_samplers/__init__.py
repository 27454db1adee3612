"""Samplers besides sampling in turns (sampling while the engine trains, recorded rollouts) and an adaptive order of tasks."""
