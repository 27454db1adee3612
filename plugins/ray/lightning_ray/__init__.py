"""Runs agents in a Ray cluster: actors that each have a fork server and worker processes, as the process runner has.

The invariant: see `lightning_ray.runner`. Nothing is imported here, since Ray takes seconds to import.
"""
