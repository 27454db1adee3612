"""Adapter for openai_agents."""
