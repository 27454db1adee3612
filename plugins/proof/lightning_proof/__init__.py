"""Proofs over a finished run: `lightning audit`.

The invariant: a proof is made from the store alone, and reads only.
"""
