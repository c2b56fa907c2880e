"""The public functions: check, choose an implementation, finish what it sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import compiled, reference, streamed
from .checks import as_rows, check_head, check_impl, check_labels, check_logits, check_temperature
from .linear import joined_partials as linear_joined_partials
from .linear import scaled_logits
from .partials import Partials, TokenStatistics, collect, join, statistics_of, sum_pi_squared_of
from .vocab_parallel import join_over, place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PartialsFunction = Callable[[Tensor, Tensor | None, int, Tensor | None], Tensor]


def chosen(where: Tensor | torch.device | str, impl: str = "auto", process_group: ProcessGroup | None = None) -> str:
    """What `impl` means for these logits (or hidden states), or on this device: "reference", "torch" or "triton".

    "auto" is Triton on a GPU where Triton is installed, torch elsewhere.
    """
    device = where.device if isinstance(where, Tensor) else torch.device(where)
    check_impl(impl, device, process_group)
    if impl == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") else "torch"
    return impl


def partials_function(impl: str, device: torch.device, tokens: int, vocabulary: int) -> PartialsFunction:
    if impl == "torch":
        return compiled.partials if compiled.worth_it(device, tokens, vocabulary) else streamed.partials
    from .triton_kernels import partials  # late: Triton is not imported before it is wanted

    return partials


def joined_partials(
    logits: Tensor, labels: Tensor | None, first: int, temperature: Tensor | None, impl: str
) -> Partials:
    """Sums over these columns of the vocabulary, which start at `first`."""
    tokens = logits.shape[:-1].numel()
    partials = partials_function(impl, logits.device, tokens, logits.shape[-1])

    def parts() -> Iterator[tuple[slice, Partials]]:
        done = 0
        for rows in as_rows(logits):
            here = slice(done, done := done + len(rows))
            t = None if temperature is None else temperature[here]
            yield here, join(partials(rows, None if labels is None else labels[here], first, t), t)

    return collect(tokens, parts(), logits.device)


@torch.no_grad()
def sum_pi_squared(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Σ_v π_v² of each token's π = softmax(logits / temperature): `token_statistics` without labels."""
    check_logits(logits)
    shape = logits.shape[:-1]
    scale = check_temperature(temperature, shape, logits.device)
    impl = chosen(logits, impl, process_group)
    if impl == "reference":
        return reference.sum_pi_squared(logits, None if scale is None else scale.view(shape))
    joined = joined_partials(logits, None, 0, scale, impl)
    if process_group is not None:
        joined = join_over(process_group, joined)
    return sum_pi_squared_of(joined).view(shape)


@torch.no_grad()
def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
    process_group: ProcessGroup | None = None,
) -> TokenStatistics:
    """log π of the labels, entropy and Σπ² of each token's π = softmax(logits / temperature), in one read.

    With m = max z, a = Σ e^{z−m}, b = Σ e^{2(z−m)}, c = Σ (z−m) e^{z−m}: log π_v = z_v − m − log a,
    entropy = log a − c/a, Σπ² = b/a². The token energy of arXiv 2602.07078 is 1 − 2π + Σπ².

    Args:
        logits: (..., V), bfloat16, float16, float32 or float64 (which all but the reference round to float32 first),
            of any strides; never changed. −inf entries have π = 0. A token with only −inf, or with NaN or +inf, is
            NaN in all three; other tokens are not touched.
        labels: (...), integers in [0, V).
        temperature: a number, or one value a token of shape (...); applied in float32.
        impl: "auto" (see `chosen`); "reference": plain, on whole tensors, in float64; "torch": streamed in chunks,
            at most 64 MiB of extra memory, by torch.compile where that pays on a CPU and a C++ compiler is there;
            "triton". The last two sum in float32, in blocks.
        process_group: the ranks over which the vocabulary is split evenly, in rank order. `logits` are then this
            rank's columns, `labels` count in the whole vocabulary, and every rank gets the whole's statistics.

    Returns:
        Three float32 tensors of shape (...) (float64 from the reference on float64 logits), without gradient.

    Raises:
        ValueError: a wrong type, dtype, shape or device, an unknown impl, a temperature not above 0, a label out of
            range. Nothing waits for a GPU: there a label out of range is a device-side assertion, and a bad
            temperature in a tensor makes its token NaN.
    """
    check_logits(logits)
    shape, columns = logits.shape[:-1], logits.shape[-1]
    rank, ranks = place(process_group)
    scale = check_temperature(temperature, shape, logits.device)
    flat = check_labels(labels, shape, columns * ranks, logits.device)
    impl = chosen(logits, impl, process_group)
    if impl == "reference":
        return reference.token_statistics(logits, flat.view(shape), None if scale is None else scale.view(shape))
    joined = joined_partials(logits, flat, rank * columns, scale, impl)
    if process_group is not None:
        joined = join_over(process_group, joined)
    return TokenStatistics(*(statistic.view(shape) for statistic in statistics_of(joined)))


@torch.no_grad()
def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
) -> TokenStatistics:
    """`token_statistics` of the logits hidden · weightᵀ + bias, which never exist as a whole.

    A chunk of logits is made by the same product as the head's, rounded to hidden's dtype, and divided by the
    temperature in that dtype: the numbers of a model that makes its logits and scales them. (verl's fused kernels
    round so too, and log-probs must agree with the training forward.)

    Args:
        hidden: (..., d), floating point; weight: (V, d); bias: (V,) or None; of one dtype, or under autocast.
        labels: (...), integers in [0, V).
        temperature: a number, or one value a token of shape (...).
        impl: as for `token_statistics`; all but the reference take at most 128 MiB of extra memory.

    Returns, Raises: as `token_statistics`.
    """
    check_head(hidden, weight, bias)
    shape = hidden.shape[:-1]
    scale = check_temperature(temperature, shape, hidden.device)
    flat = check_labels(labels, shape, len(weight), hidden.device)
    impl = chosen(hidden, impl)
    rows = hidden.reshape(-1, hidden.shape[-1])
    divisor = scale if scale is not None and isinstance(temperature, Tensor) else float(temperature)
    if impl == "reference":
        logits = scaled_logits(rows, weight, bias, divisor)
        found = reference.token_statistics(logits, flat, None)
        return TokenStatistics(*(statistic.view(shape) for statistic in found))
    partials = partials_function(impl, hidden.device, len(rows), len(weight))
    joined = linear_joined_partials(rows, weight, bias, flat, divisor, partials)
    return TokenStatistics(*(statistic.view(shape) for statistic in statistics_of(joined)))
