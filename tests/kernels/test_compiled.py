"""The compiled kernel of the "torch" implementation: as accurate as the streamed one, and silent where it cannot be."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from verl_otb.kernels import compiled, sum_pi_squared, token_statistics

QWEN = 151_936


@pytest.fixture
def always(monkeypatch):
    """Compile for any size, and be found to have compiled."""
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 0)
    monkeypatch.setattr(compiled, "failed", False)
    yield
    assert not compiled.failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["flat", "mid", "peaked"])
def test_error_budget_at_a_full_vocabulary(rows, within_budget, always, kind, dtype):
    logits = rows(kind, 12, QWEN).to(dtype)
    likeliest, any_label = logits.argmax(-1), torch.arange(12) * 12_345
    within_budget(logits, likeliest, lambda: token_statistics(logits, likeliest))
    t = torch.linspace(0.3, 3.0, 12)
    within_budget(logits, any_label, lambda: token_statistics(logits, any_label, temperature=t), t)


@pytest.mark.parametrize("tokens", [2, 17, 111])  # 17 and 111 leave a last call of one row and of a few
def test_odd_rows_beside_sound_ones(always, monkeypatch, tokens):
    vocabulary = 3 * compiled.BLOCK + 5
    monkeypatch.setattr(compiled, "CHUNK", 16 * vocabulary)
    base = torch.randn(tokens, vocabulary + 3)
    logits = base[:, 3:]
    odd = min(tokens, 7)
    logits[0, compiled.BLOCK :] = -math.inf  # only the first block is live
    logits[1, :-2] = -math.inf  # only the rest is
    if odd == 7:
        logits[2] = -math.inf
        logits[3, 1_000], logits[4, -1] = math.nan, math.nan
        logits[5, 1_000], logits[6, -1] = math.inf, math.inf
    labels = torch.randint(vocabulary, (tokens,))
    labels[:2] = torch.tensor([7, vocabulary - 1])
    before = base.clone()
    for temperature in (1.0, torch.linspace(0.5, 2, tokens)):
        found = token_statistics(logits, labels, temperature=temperature)
        truth = token_statistics(logits.double(), labels, temperature=temperature, impl="reference")
        for ours, exact in zip(found, truth, strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=3e-7, equal_nan=True)
        assert int(found.entropy.isnan().sum()) == (5 if odd == 7 else 0)
    assert torch.equal(sum_pi_squared(logits).isnan(), found.sum_pi_squared.isnan())
    assert torch.equal(base.nan_to_num(), before.nan_to_num())


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_without_a_compiler_it_streams_and_says_nothing(tmp_path):
    code = """
    import torch
    from verl_otb.kernels import compiled, token_statistics
    logits, labels = torch.randn(512, 40_000), torch.zeros(512, dtype=torch.long)
    compiled.failed = True
    streamed = token_statistics(logits, labels)
    compiled.failed = False
    assert compiled.worth_it(logits.device, *logits.shape)
    found = token_statistics(logits, labels)
    assert compiled.failed
    assert all(torch.equal(a, b) for a, b in zip(found, streamed))
    """
    nowhere = str(tmp_path / "none")
    child = in_a_process(code, PATH=nowhere, CXX=nowhere, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


def test_torch_can_switch_it_off():
    code = """
    import torch
    from verl_otb.kernels import compiled
    assert not compiled.worth_it(torch.device("cpu"), 1 << 20, 1 << 20)
    """
    assert in_a_process(code, TORCH_COMPILE_DISABLE="1").returncode == 0
    assert in_a_process(code, TORCH_COMPILE_DISABLE="").returncode == 1  # torch 2.6 takes "0" for yes
