"""Each implementation of the token statistics on a small sample, against the definition in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from verl_otb.doctor.result import Result, failed, ok, reason, skipped
from verl_otb.kernels import TokenStatistics, linear_token_statistics, token_statistics

TOLERANCE = 1e-5  # of 1 + |exact|: float32 sums over a thousand columns stay below a tenth of it
TEMPERATURE = 0.7


def check(_: bool) -> Iterator[Result]:
    gpu = torch.cuda.is_available()
    yield _compared("torch", "cpu", *(["cuda"] if gpu else []))
    if not find_spec("triton"):
        yield skipped("kernel.triton", "triton is not installed")
    elif gpu:
        yield _compared("triton", "cuda")
    elif os.environ.get("TRITON_INTERPRET") == "1":
        yield _compared("triton", "cpu")
    else:
        yield skipped("kernel.triton", "this process sees no GPU (TRITON_INTERPRET=1 runs it on the CPU)")


def _compared(impl: str, *devices: str) -> Result:
    name = f"kernel.{impl}"
    todo = "Do not train with OTB on this machine. Report it with the facts above; another torch or triton may do."
    try:
        error, where = max(_errors(impl, devices))
    except Exception as problem:
        return failed(name, f"failed: {reason(problem)}", todo)
    if not error <= TOLERANCE:
        return failed(name, f"{where} is off by {error:.1e} from the definition; {TOLERANCE:.0e} is allowed", todo)
    return ok(name, f"at most {error:.1e} from the definition in float64, on {' and '.join(devices)}")


def _errors(impl: str, devices: tuple[str, ...]) -> Iterator[tuple[float, str]]:
    """The largest error of each statistic, relative to 1 + |exact|, with its name; infinite for NaN."""
    random = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(48, 32, generator=random), torch.randn(1000, 32, generator=random)
    labels = torch.randint(1000, (48,), generator=random)
    # From flat to peaked; a third of the vocabulary masked, but for the labels.
    logits = hidden @ head.T * torch.linspace(0.01, 2.0, 48)[:, None]
    kept = logits.gather(1, labels[:, None])
    logits = logits.masked_fill(torch.arange(1000) % 3 == 0, -torch.inf).scatter(1, labels[:, None], kept)
    for device in devices:
        target = labels.to(device)
        for sample in (logits.to(device), logits.bfloat16().to(device)):
            exact = token_statistics(sample.double(), target, temperature=TEMPERATURE, impl="reference")
            found = token_statistics(sample, target, temperature=TEMPERATURE, impl=impl)
            yield from _compare(found, exact, f"of {sample.dtype} logits on {device}")
        from_hidden = hidden.to(device), head.to(device), target
        exact = linear_token_statistics(*from_hidden, temperature=TEMPERATURE, impl="reference")
        found = linear_token_statistics(*from_hidden, temperature=TEMPERATURE, impl=impl)
        yield from _compare(found, exact, f"of hidden states on {device}")


def _compare(found: TokenStatistics, exact: TokenStatistics, of: str) -> Iterator[tuple[float, str]]:
    for name, ours, truth in zip(TokenStatistics._fields, found, exact, strict=True):
        error: Tensor = ((ours.double() - truth) / (1 + truth.abs())).abs().nan_to_num(torch.inf)
        yield float(error.max()), f"{name} {of}"
