"""Extra memory is bounded at any number of tokens, and Triton stays out until it is wanted."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MEASURE = """
    import ctypes, pathlib, torch
    from verl_otb.kernels import compiled, linear_token_statistics, sum_pi_squared, token_statistics
    def resident(line):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split(line)[1].split()[0]) / 1024
    def extra_peak(call):
        call(slice(0, 4))  # loads libraries, compiles
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        before = resident("VmRSS:")
        call(slice(None))
        return resident("VmHWM:") - before
    compiled.WORTH_COMPILING = {worth_compiling}
"""
FROM_LOGITS = """
    logits = torch.empty({rows}, 64, 32_000, dtype=torch.bfloat16).normal_(){view}
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
    temperature = torch.full(labels.shape, 0.7)
    def call(rows):
        token_statistics(logits[rows], labels[rows], temperature=temperature[rows])
        sum_pi_squared(logits[rows])
    print(extra_peak(call))
"""
FROM_HIDDEN = """
    hidden = torch.empty({tokens}, 64, dtype=torch.{dtype}).normal_()
    weight = torch.empty(32_000, 64, dtype=torch.{dtype}).normal_()
    bias = torch.zeros(32_000, dtype=torch.{dtype})
    labels = torch.zeros({tokens}, dtype=torch.long)
    def call(rows):
        linear_token_statistics(hidden[rows], weight, labels[rows], bias=bias, temperature=0.7)
    print(extra_peak(call))
"""
COMPILED, EAGER = 1, 1 << 60


def in_a_process(code: str, worth_compiling: int) -> float:
    code = textwrap.dedent(MEASURE).format(worth_compiling=worth_compiling) + textwrap.dedent(code)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return float(child.stdout)


@pytest.mark.parametrize("worth_compiling", [COMPILED, EAGER], ids=["compiled", "eager"])
@pytest.mark.parametrize("view", ["", "[:, 1:]"], ids=["contiguous", "a slice"])
def test_from_logits_within_64_mib(view, worth_compiling):
    """Of 250 MiB of logits; stock takes twice as much again."""
    assert in_a_process(FROM_LOGITS.format(rows=64, view=view), worth_compiling) <= 64


@pytest.mark.parametrize("worth_compiling", [COMPILED, EAGER], ids=["compiled", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_from_hidden_states_within_128_mib(dtype, worth_compiling):
    """Of 500 and 1,000 MiB of logits, if they were made."""
    assert in_a_process(FROM_HIDDEN.format(tokens=8192, dtype=dtype), worth_compiling) <= 128


def test_the_measure_sees_memory():
    code = """
    print(extra_peak(lambda rows: torch.ones(100 << 18).sum()))
    """
    assert 95 <= in_a_process(code, EAGER) <= 105


def test_triton_is_not_imported():
    code = """
    import sys
    token_statistics(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    print(float("triton" in sys.modules))
    """
    assert in_a_process(code, EAGER) == 0
