"""Redis does every operation of the table, and those on tokens."""

from __future__ import annotations

import inspect

from lightning.store.operation import Operations, operations_of
from lightning_redis.store import FUNCTIONS
from lightning_server import tokens_redis
from lightning_server.tokens import TOKENS


def test_redis_has_a_function_with_the_arguments_of_each_operation() -> None:
    own = operations_of(Operations)
    assert set(FUNCTIONS) == {operation.name for operation in own}
    assert set(tokens_redis.FUNCTIONS) == {operation.name for operation in TOKENS.operations}
    functions = {**FUNCTIONS, **tokens_redis.FUNCTIONS}
    for operation in (*own, *TOKENS.operations):
        found = list(inspect.signature(functions[operation.name]).parameters)[1:]
        assert found == list(operation.signature.parameters), operation
