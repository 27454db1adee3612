"""The gateway of the core's tests."""

from __future__ import annotations

from tests.core.gateway.conftest import build, house

__all__ = ["build", "house"]
