"""Imports verl's workers or its Megatron engine for `lightning doctor --try verl`, in a separate process, and prints the
device: `python -m lightning_verl.probe worker|megatron`."""

from __future__ import annotations

import json
import sys
from importlib import import_module

from lightning_verl.device import choose

if __name__ == "__main__":
    device = choose("auto")
    import_module(f"lightning_verl.{sys.argv[1]}")
    sys.stdout.write(json.dumps({"device": device}) + "\n")
