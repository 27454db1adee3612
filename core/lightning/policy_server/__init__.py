"""The policy server: one vLLM that takes new weights while it runs.

The invariant: importing this package costs nothing, since vLLM's own processes import it too, for `launch` and `worker`.
"""
