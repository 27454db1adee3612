"""The gateway of the core's own tests."""

from __future__ import annotations

from tests.core.gateway.conftest import build, house

__all__ = ["build", "house"]
