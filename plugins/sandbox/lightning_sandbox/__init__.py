"""Limits for agents on a machine: a bubblewrap sandbox for each agent's process, or for a program that an agent runs; and how
many runs of a tool may be under way at once."""
