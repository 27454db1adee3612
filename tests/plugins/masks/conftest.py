"""The engine's models and the gateway's house, for masked calls."""

from tests.core.engines.conftest import exact_norm, model, open_engine  # noqa: F401 — fixtures
from tests.core.gateway.conftest import build, house  # noqa: F401 — fixtures
