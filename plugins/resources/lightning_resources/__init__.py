"""Versions of prompts, weights and settings, which aliases point to: operations on every store, `lightning resources`, prompts
that a run is given by `resource:NAME@ALIAS`, and the weights that it leaves."""
