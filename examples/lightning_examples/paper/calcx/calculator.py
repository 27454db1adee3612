"""The calculator of the Calc-X agent: exact fractions, powers, roots and percentages.

The invariant: nothing but arithmetic is ever evaluated, whatever the model writes, and it ends at once. The data set's own
calculator is sympy, which runs what it parses: no tool for a model in training.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = "Fraction | float"
OPERATORS: dict[type[ast.AST], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "log": math.log, "exp": math.exp, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
LONGEST, LARGEST, POWER = 300, 1e30, 64
"""Characters of an expression, absolute value of a result, absolute value of an exponent."""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly: numbers, + - * / // % ** and brackets, sqrt, log, exp, sin, cos, tan, pi."""
    if len(expression) > LONGEST:
        raise ValueError("expression too long")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression).replace("^", "**")
    text = re.sub(r"%(?!\s*[\w(.])", "/100", text)  # 20% is a number, 20 % 7 a remainder
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot calculate that: {error}") from error
    return _shown(value)


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            result: Number = Fraction(value)
        case ast.Constant(value=float() as value) if math.isfinite(value):
            result = Fraction(repr(value))  # as it is written: 0.1 is a tenth
        case ast.Name(id="pi"):
            result = math.pi
        case ast.BinOp(left, ast.Pow(), right):
            result = _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(ast.USub(), operand):
            result = -_evaluate(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            result = _evaluate(operand)
        case ast.Call(ast.Name(id=name), [argument], []) if name in FUNCTIONS:
            result = FUNCTIONS[name](float(_evaluate(argument)))
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets, sqrt, log, exp, sin, cos, tan, pi")
    if not -LARGEST <= result <= LARGEST:
        raise ValueError("number too large")
    if isinstance(result, float):
        return result
    # A power of a power of a fraction would soon have millions of digits.
    return Fraction(result) if result.denominator <= LARGEST else float(result)


def _power(base: Number, exponent: Number) -> Number:
    if not -POWER <= exponent <= POWER:
        raise ValueError(f"exponents are at most {POWER}")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0:
        raise ValueError("no root of a negative number")
    return float(float(base) ** float(exponent))


def _shown(value: Number) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value) if value.denominator == 1 else f"{value} = about {float(value):.10g}"
