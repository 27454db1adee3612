"""Adapter for LlamaIndex: names callers by agent and tool, and reports tool runs."""
