"""Runs agents in pods of a Kubernetes cluster. Each pod is a client (`lightning runner`) of the run's server.

The invariant is that of `lightning_k8s.keeper`. This package imports nothing here, so that a trainer without a cluster pays
nothing.
"""
