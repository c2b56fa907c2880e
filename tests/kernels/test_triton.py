"""The Triton kernel: on the CPU by Triton's interpreter, and compiled for a GPU that need not be there.

The interpreter must be asked for before Triton is imported, so it has a process of its own, which runs the other
files of this directory for impl="triton". By hand: TRITON_INTERPRET=1 pytest tests/kernels -k triton
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_otb.kernels import token_statistics
from verl_otb.kernels.partials import join, statistics_of

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_everything_in_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(HERE), "-k", "triton", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-6000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed, child.stdout[-2000:]
    assert int(passed[1]) > 60, child.stdout[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="in the child process")
@pytest.mark.parametrize("launch", [(1, 8, 4, 1), (2, 4, 1, 1), (8, 8, 2, 3)])
@pytest.mark.parametrize("pieces", [1, 2, 5, 1000])
def test_triton_pieces_of_a_row(launch, pieces):
    from verl_otb.kernels import triton_kernels

    torch.manual_seed(0)
    logits = torch.randn(5, 20_011) * 3
    logits[1, :9000] = -torch.inf
    labels = torch.tensor([0, 20_010, 8_192, 4_095, 12_288])
    temperature = torch.linspace(0.5, 2, 5)
    planes = triton_kernels.partials(logits, labels, 0, temperature, triton_kernels.Launch(*launch), pieces)
    assert planes.shape[-1] <= pieces
    assert not planes.isnan().any()
    found = statistics_of(join(planes, temperature))
    truth = token_statistics(logits.double(), labels, temperature=temperature, impl="reference")
    for ours, exact in zip(found, truth, strict=True):
        assert (ours - exact).abs().max() <= 2e-6


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled by the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("temperature", [False, True])
def test_triton_compiles_for_a_gpu(dtype, temperature):
    """For compute capability 9.0: it compiles, spills nothing, and reads 16 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "constexprs" not in inspect.signature(ASTSource).parameters:
        pytest.skip(f"triton {triton.__version__} has another compiler interface")
    from verl_otb.kernels import triton_kernels

    launch = triton_kernels.DEFAULT
    constants = {
        "column_stride": 1, "pieces": 1, "HAS_LABELS": True, "HAS_TEMPERATURE": temperature,
        "DEPTH": launch.depth, "LANES": launch.lanes, "STAGES": launch.num_stages,
    }  # fmt: skip
    pointers = {"logits": f"*{dtype}", "labels": "*i64", "temperature": "*fp32", "planes": "*fp64"}
    integers = dict.fromkeys(("row_stride", "vocabulary", "first", "width"), "i32")
    names = triton_kernels.partials_kernel.arg_names
    known = {**dict.fromkeys(constants, "constexpr"), **pointers, **integers}
    by_16 = [["tt.divisibility", 16]]
    source = ASTSource(
        triton_kernels.partials_kernel,
        {name: known[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): by_16 for name in (*pointers, "row_stride", "vocabulary", "width")},
    )
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch.num_warps})
    ptx = compiled.asm["ptx"]
    assert ".local" not in ptx
    assert re.search(r"ld\.global(\.\w+)*\.v(4\.b32|2\.b64)", ptx)
