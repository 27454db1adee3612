"""CrewAI is imported before the tests: its import warns, and what warns here is an error. Its telemetry is off also where a
test runs it without the adapter, which keeps it off elsewhere; and what it stores goes to a folder of its own."""

import atexit
import os
import shutil
import tempfile
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["CREWAI_STORAGE_DIR"] = tempfile.mkdtemp(prefix="crewai-")
atexit.register(shutil.rmtree, os.environ["CREWAI_STORAGE_DIR"], ignore_errors=True)

with warnings.catch_warnings(action="ignore"):
    import crewai  # noqa: F401
