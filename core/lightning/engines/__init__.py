"""Engines: what holds and trains the weights."""
