"""Adapter for autogen."""
