"""Adapter for DSPy: names callers by agent and tool, and reports tool runs."""
