"""A new field of a noun reaches Redis."""

from __future__ import annotations

import subprocess
import sys

ADDED = """
import dataclasses
import lightning.types as types

Old = types.Rollout

@dataclasses.dataclass(frozen=True, slots=True)
class Rollout(Old):
    ancestor: str = ""

types.Rollout = Rollout

from lightning_redis import rollout_codec

made = Rollout("a", "run", types.Task("q"), "g", ancestor="first")
begun = b'{"status": "pending", "attempt": 0, "spent": 0, "max": 2}'
assert rollout_codec.read_rollout(rollout_codec.columns_of(made).encode(), begun, "a").ancestor == "first"
"""


def test_a_new_field_of_a_rollout_is_kept() -> None:
    ran = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
