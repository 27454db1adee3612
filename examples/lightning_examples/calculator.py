"""The calculator that the math agents have as a tool.

The invariant: nothing but arithmetic is ever evaluated, whatever the model writes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LIMIT = 1e12


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / and brackets; nothing else is ever evaluated."""
    if len(expression) > 100:
        raise ValueError("expression too long")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError("cannot calculate that") from error
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_evaluate(operand))
        case _:
            raise ValueError("only numbers and + - * /")
    if not abs(result) <= LIMIT:
        raise ValueError("number too large")
    return result
