"""What the tests of the core's policy server have, too."""

from __future__ import annotations

from tests.core.policy_server.conftest import alter, fake, model  # noqa: F401 — fixtures
