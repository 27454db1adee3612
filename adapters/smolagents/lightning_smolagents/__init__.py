"""Adapter for smolagents: names callers by agent and tool, and reports tool runs."""
