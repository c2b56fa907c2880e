"""Given to a run as `multi_turn.function_tool_path`: a calculator, and a call for it that a random model makes often.

A call opens with a token of an odd id and ends the turn with one whose id is a multiple of 16, so the model makes one
in two turns of three and is cut within one now and then. Results have 1 to 37 digits.
"""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

CLOSING = range(0, 256, 16)


def opening(tokens: list[int]) -> int | None:
    """The token that opens a call in a turn's `tokens`, if one does."""
    return next((token for token in tokens if token % 2), None)


def call(tokens: list[int]) -> tuple[int, int] | None:
    """The base and the exponent of the call that a turn's `tokens` end with, if they do."""
    base = opening(tokens)
    return None if base is None or tokens[-1] not in CLOSING else (base, tokens[-1] // CLOSING.step)


@function_tool
def power(base: int, exponent: int) -> str:
    """Raise a number to a power.

    Args:
        base: the number.
        exponent: the power.
    """
    return str(base**exponent)


@ToolParser.register("odd_token")
class OddTokenParser(ToolParser):
    @property
    def stop_token_ids(self) -> list[int]:
        return list(CLOSING)

    async def extract_tool_calls(self, responses_ids, tools=None):
        if (made := call(responses_ids)) is None:
            return "", []
        arguments = json.dumps(dict(zip(("base", "exponent"), made, strict=True)))
        return "", [FunctionCall(name=power.__name__, arguments=arguments)]
