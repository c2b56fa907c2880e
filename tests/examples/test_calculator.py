"""The calculator of the TIR example, loaded and called as verl's tool agent loop loads and calls it."""

import asyncio
import json

import pytest
from verl_run import REPOSITORY


@pytest.fixture(scope="module")
def tool():
    from verl.tools.function_tool import load_function_tools_from_path

    (tool,) = load_function_tools_from_path(str(REPOSITORY / "examples" / "calculator.py"))
    return tool


def test_schema(tool):
    function = tool.tool_schema.model_dump(exclude_none=True)["function"]
    assert function["name"] == "calculator"
    assert list(function["parameters"]["properties"]) == ["expression"]
    assert function["parameters"]["required"] == ["expression"]


def test_a_call_as_qwen3_writes_it(tool, tiny_task):
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.tool_parser import ToolParser

    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    call = {"name": "calculator", "arguments": {"expression": "(17 * 3 + 4) / 5"}}
    text = f"I compute it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    async def answer():
        parser = ToolParser.get_tool_parser("hermes", tokenizer)
        _, (made,) = await parser.extract_tool_calls(tokenizer.encode(text), [tool.tool_schema])
        assert made.name == tool.name
        return await tool.call(json.loads(made.arguments))

    assert asyncio.run(answer()) == "11"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        (" -7 // 2 ", "-4"),
        ("2 ** 10 % 1000", "24"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("+(1.5e3)", "1500"),
        ("2 ** -1", "0.5"),
    ],
)
def test_values(tool, expression, result):
    assert tool.fn(expression) == result


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("9 ** 9 ** 9", "too large"),
        ("1 +", "not an arithmetic expression"),
        ("x + 1", "only numbers"),
        ("__import__('os').getcwd()", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * 201, "201 characters, 200 at most"),
        ("(" * 150 + "1" + ")" * 40, "not an arithmetic expression"),
    ],
)
def test_what_it_refuses(tool, expression, error):
    with pytest.raises(ValueError, match=error):
        tool.fn(expression)


def test_division_by_zero(tool):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        tool.fn("1 / (2 - 2)")
