"""The table of operations says all that is needed, and all of it is done."""

from __future__ import annotations

import inspect

import pytest
from lightning.store.operation import ANY, HttpLine, Operation, Operations, operations_of
from lightning.store.relational.store import OWN, RelationalStore


def test_what_names_nothing_of_a_project_cannot_be_an_operation() -> None:
    async def everything(store: object, since: float) -> list[str]:
        """All there is."""
        return []

    with pytest.raises(TypeError, match="the operation everything names nothing of a project"):
        Operation(everything, HttpLine("GET /everything", ANY))


def test_an_sql_database_has_a_function_with_the_arguments_of_each_operation() -> None:
    functions = OWN.functions
    assert set(functions) <= {operation.name for operation in operations_of(Operations)}
    for operation in operations_of(Operations):
        if operation.name in functions:
            found = list(inspect.signature(functions[operation.name]).parameters)[1:]
            assert found == list(operation.signature.parameters), operation
        else:
            assert operation.name in vars(RelationalStore), f"nothing is done for {operation}"
