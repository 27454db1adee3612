"""A gateway between a fake vLLM and a memory store, as the core's own tests have it."""

from __future__ import annotations

from tests.core.gateway.conftest import build, house  # noqa: F401 — fixtures
