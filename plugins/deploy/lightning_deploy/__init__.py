"""Runs in number: `lightning sweep`, the same training with other seeds and settings, as a queue on this machine.

The invariant: a run of a sweep is an ordinary run of `lightning train`, in a folder of its own, and what the sweep knows of it
is in that folder; so a sweep that was stopped goes on from the folders.
"""
