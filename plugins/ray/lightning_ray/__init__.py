"""Runs agents in a Ray cluster, in actors that each have a fork server and worker processes, as the process runner has.

The invariant is that of `lightning_ray.runner`. Nothing is imported here, since importing Ray takes seconds.
"""
