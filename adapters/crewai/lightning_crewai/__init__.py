"""Adapter for CrewAI: names callers by agent and tool, and reports tool runs."""
