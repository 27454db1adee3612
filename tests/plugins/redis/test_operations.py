"""Redis does every operation of the table."""

from __future__ import annotations

import inspect

from lightning.store.operations import OPERATIONS
from lightning_redis.store import FUNCTIONS


def test_redis_has_a_function_with_the_arguments_of_each_operation() -> None:
    assert set(FUNCTIONS) == {operation.name for operation in OPERATIONS}
    for operation in OPERATIONS:
        found = list(inspect.signature(FUNCTIONS[operation.name]).parameters)[1:]
        assert found == list(operation.signature.parameters), operation
