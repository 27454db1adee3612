"""Runs agents in pods of a Kubernetes cluster, each of which is a client (`lightning runner`) of the run's server.

The invariant: see `lightning_k8s.keeper`. Nothing is imported here, so that a trainer without a cluster pays nothing.
"""
