"""What `lightning doctor` tries in a process of its own, since it takes long, or may crash: `python -m lightning.cli.probe`.

The invariant: standard output is one JSON document, or the exit code is not 0 and the last line of standard error says why.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from typing import Any


def main(arguments: list[str]) -> None:
    """`verl`: import the workers, as a run does. `ray ADDRESS`: attach to a cluster; its version, and GPUs of its nodes."""
    found = _verl() if arguments[0] == "verl" else _ray(arguments[1])
    sys.stdout.write(json.dumps(found) + "\n")


def _verl() -> dict[str, object]:
    from lightning.engines.verl.device import choose

    device = choose("auto")
    import lightning.engines.verl.worker  # noqa: F401 — that it can be imported is what is asked

    return {"device": device}


def _ray(address: str) -> dict[str, object]:
    ray: Any = import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="lightning")
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {"version": ray.__version__, "gpus": [int(node["Resources"].get("GPU", 0)) for node in alive]}


if __name__ == "__main__":
    main(sys.argv[1:])
