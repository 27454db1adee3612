"""Adapter for langchain."""
