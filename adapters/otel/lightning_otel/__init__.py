"""Adapter for otel."""
