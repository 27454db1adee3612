"""DSPy fetches the prices of models when it answers for the first time: not here."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
