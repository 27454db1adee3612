"""Runs agents and the policy's vLLMs in a Ray cluster: agents in worker processes of actors, as the process runner does, and
each vLLM in an actor of its own.

The invariants are those of `lightning_ray.runner` and `lightning_ray.vllm_on_ray`. Nothing is imported here, since importing
Ray takes seconds.
"""
