"""Adapter for plain Python agents."""
