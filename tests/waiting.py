"""Wait for other threads and processes. `HANG` is the timeout of a hanging test, not an expected duration."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import time
from collections.abc import Callable, Iterator
from typing import Any

HANG = 120.0
"""Seconds. Waits of this length are reached only where something is broken, also on a machine that is busy."""

NEVER = 10 * HANG
"""Seconds. The delay of a response that must not end by itself while a test waits."""

MAX_SHOWN = 2000
"""How many characters of a value a failed wait shows: the last ones, since logs end with the error."""


def until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Wait until `condition` holds. If it never does, the error shows what its comparisons have seen last."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s: {describe(condition)}"
        time.sleep(0.002)


async def auntil(condition: Callable[[], object]) -> None:
    """Wait on an event loop until `condition` holds; see `until`."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {HANG:g} s: {describe(condition)}"
        await asyncio.sleep(0.002)


def describe(condition: Callable[[], object]) -> str:
    """Return the source of a condition and the present values of what it compares."""
    expression = _source_of(condition)
    if expression is None:
        return repr(condition)
    variables = {**condition.__globals__, **inspect.getclosurevars(condition).nonlocals, **_defaults(condition)}
    values = [f"\n  {ast.unparse(part)} = {_value_of(part, variables)}" for part in _operands(expression)]
    return ast.unparse(expression) + "".join(values)


def _source_of(condition: Any) -> ast.expr | None:
    """Return the body of a lambda; None for other callables, and if a line has several lambdas."""
    code = getattr(condition, "__code__", None)
    if code is None or condition.__name__ != "<lambda>":
        return None
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno]
    return lambdas[0].body if len(lambdas) == 1 else None


def _defaults(condition: Any) -> dict[str, object]:
    """Return the arguments with which the lambda is called: the defaults of its parameters."""
    parameters = inspect.signature(condition).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


def _operands(expression: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression compares, without constants, and the calls whose results it passes on."""
    match expression:
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            parts = [operand]
        case ast.Compare(left=left, comparators=comparators):
            parts = [left, *comparators]
        case ast.Constant():
            return
        case ast.Call(args=arguments):
            yield expression
            parts = [argument for argument in arguments if isinstance(argument, ast.Call)]
        case _:
            yield expression
            return
    for part in parts:
        yield from _operands(part)


def _value_of(expression: ast.expr, variables: dict[str, Any]) -> str:
    try:
        value = eval(compile(ast.Expression(expression), "<condition>", "eval"), variables)
    except Exception as error:  # noqa: BLE001 - it is shown
        value = error
    return repr(value)[-MAX_SHOWN:]
