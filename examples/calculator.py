"""The tool of run_qwen3_8b_tir.sh: a calculator, as a verl function tool (`multi_turn.function_tool_path`)."""

import ast
import operator

from verl.tools.function_tool import function_tool

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LONGEST = 200  # characters
# A model writes what it likes: 9**9**9 would keep the rollout's process busy for hours.
LARGEST_POWER = 1000  # bits


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, for example "(17 * 3 + 4) / 5".
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, {LONGEST} at most are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("not an arithmetic expression") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            whole = isinstance(a, int) and isinstance(b, int)
            if isinstance(op, ast.Pow) and whole and a.bit_length() * abs(b) > LARGEST_POWER:
                raise ValueError(f"{a}**{b} is too large")
            value = OPERATORS[type(op)](a, b)
            if isinstance(value, complex):
                raise ValueError(f"{a}**{b} is not a real number")
            return value
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
