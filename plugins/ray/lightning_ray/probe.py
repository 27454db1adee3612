"""Attaches to a Ray cluster and prints its version and GPUs, for `lightning doctor`, in a separate process: `python -m
lightning_ray.probe ADDRESS`."""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    ray: Any = import_module("ray")
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR, namespace="lightning")
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = {"version": ray.__version__, "gpus": [int(node["Resources"].get("GPU", 0)) for node in alive]}
    sys.stdout.write(json.dumps(found) + "\n")
