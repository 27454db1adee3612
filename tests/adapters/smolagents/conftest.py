"""LiteLLM fetches the prices of models when it is imported: not here."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
