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
    """`verl`, `megatron`: import the workers, or that engine of theirs, as a run does. `ray ADDRESS`: attach to a cluster; its
    version, and GPUs of its nodes."""
    found = _ray(arguments[1]) if arguments[0] == "ray" else _engine(arguments[0])
    sys.stdout.write(json.dumps(found) + "\n")


def _engine(name: str) -> dict[str, object]:
    from lightning.engines.verl.device import choose

    device = choose("auto")
    import_module(f"lightning.engines.verl.{'worker' if name == 'verl' else name}")
    return {"device": device}


def _ray(address: str) -> dict[str, object]:
    ray: Any = import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="lightning")
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {"version": ray.__version__, "gpus": [int(node["Resources"].get("GPU", 0)) for node in alive]}


if __name__ == "__main__":
    main(sys.argv[1:])
