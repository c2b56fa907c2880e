"""Extra memory is bounded at any number of tokens, and Triton stays out until it is wanted."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MEASURE = """
    import resource, torch
    from verl_otb.kernels import linear_token_statistics, sum_pi_squared, token_statistics
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    def warm(n):
        small = torch.zeros(4, n)
        token_statistics(small, torch.zeros(4, dtype=torch.long), temperature=torch.ones(4))
        linear_token_statistics(torch.zeros(4, 8), torch.zeros(n, 8), torch.zeros(4, dtype=torch.long))
    warm(64)
"""
FROM_LOGITS = """
    logits = torch.empty({tokens}, 8, 32_000, dtype=torch.bfloat16).normal_()
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
    before = peak()
    token_statistics(logits{view}, labels{view}, temperature=torch.full(labels{view}.shape, 0.7))
    sum_pi_squared(logits{view})
    print(peak() - before)
"""
FROM_HIDDEN = """
    hidden = torch.empty({tokens}, 64, dtype=torch.{dtype}).normal_()
    weight = torch.empty(32_000, 64, dtype=torch.{dtype}).normal_()
    labels = torch.zeros({tokens}, dtype=torch.long)
    before = peak()
    linear_token_statistics(hidden, weight, labels, bias=weight[:, 0].contiguous(), temperature=0.7)
    print(peak() - before)
"""


def in_a_process(code: str) -> float:
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE) + textwrap.dedent(code)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(child.stdout)


@pytest.mark.parametrize("view", ["", "[:, 1:]"], ids=["contiguous", "a slice"])
@pytest.mark.parametrize("tokens", [128, 512])  # times 8: 62 and 250 MiB of logits
def test_from_logits_within_64_mib(tokens, view):
    assert in_a_process(FROM_LOGITS.format(tokens=tokens, view=view)) <= 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [600, 4096])
def test_from_hidden_states_within_128_mib(tokens, dtype):
    assert in_a_process(FROM_HIDDEN.format(tokens=tokens, dtype=dtype)) <= 128


def test_triton_is_not_imported():
    code = """
    import sys
    token_statistics(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    print(float("triton" in sys.modules))
    """
    assert in_a_process(code) == 0
