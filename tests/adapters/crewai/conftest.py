"""CrewAI is imported before the tests: its import warns, and what warns here is an error. Its telemetry is off also where a
test runs it without the adapter, which keeps it off elsewhere."""

import os
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"

with warnings.catch_warnings(action="ignore"):
    import crewai  # noqa: F401
