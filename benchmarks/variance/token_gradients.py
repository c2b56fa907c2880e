"""Inner products of the gradients of single tokens, over all parameters of a language model.

The policy gradient of a group is a weighted sum of ∂ log π(a_t)/∂θ, one term a token, and an estimator chooses nothing
but the weights. So these inner products give the squared norm of the gradient of every group, under every estimator,
without a further backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from language_model import Answers, Prompt, response_log_probs


@dataclass(frozen=True)
class TokenGradients:
    """Of the answers to one prompt.

    Attributes:
        products: ⟨∂ log π(a)/∂θ, ∂ log π(b)/∂θ⟩, (different tokens, different tokens), float64. Two tokens are the same
            where they and all before them are.
        which: int64, (rows, tokens): the number of each token; 0 after the end.
    """

    products: torch.Tensor
    which: torch.Tensor

    def path_norms(self, mask: torch.Tensor) -> torch.Tensor:
        """‖∂ log π(a_1…a_t)/∂θ‖², (rows, tokens), 0 after the end: the true one for which W_t stands."""
        within = self.products[self.which[:, :, None], self.which[:, None, :]] * mask[:, :, None] * mask[:, None, :]
        return within.cumsum(1).cumsum(2).diagonal(dim1=1, dim2=2) * mask

    def token_norms(self, mask: torch.Tensor) -> torch.Tensor:
        """‖∂ log π(a_t)/∂θ‖², (rows, tokens), 0 after the end: the true one for which w_t stands."""
        return self.products.diagonal()[self.which] * mask


def token_gradients(model: Any, prompt: Prompt, answers: Answers, sketch: int = 0, at_once: int = 8) -> TokenGradients:
    """All of it for the answers to one prompt.

    Args:
        sketch: keep this many numbers of each gradient instead of all parameters: sums of ± entries by a random hash
            (count sketch). Inner products are then right in the mean, and off by about 1/√sketch of the norms.
            0 keeps all.
        at_once: backward passes at a time; each takes the memory of a gradient.
    """
    number: dict[tuple[int, ...], int] = {}
    which = torch.zeros(answers.mask.shape, dtype=torch.int64)
    found = []
    for row, (tokens, length) in enumerate(zip(answers.tokens.tolist(), answers.mask.sum(1).tolist(), strict=True)):
        prefixes = [tuple(tokens[: end + 1]) for end in range(int(length))]
        new = [prefix for prefix in prefixes if prefix not in number]
        for prefix in new:
            number[prefix] = len(number)
        which[row, : len(prefixes)] = torch.tensor([number[prefix] for prefix in prefixes])
        if new:
            places = [len(prefix) - 1 for prefix in new]
            found += _gradients(model, prompt, answers.tokens[row, : int(length)], places, sketch, at_once)
    stacked = torch.cat(found)
    return TokenGradients((stacked @ stacked.T).double(), which)


def _gradients(
    model: Any, prompt: Prompt, answer: torch.Tensor, places: list[int], sketch: int, at_once: int
) -> Iterator[torch.Tensor]:
    """∂ log π(a_t)/∂θ of the tokens at `places`, in parts of (at most `at_once`, parameters)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    log_pi = response_log_probs(model, [prompt], answer[None])[0].cpu()
    log_probs = log_pi.gather(-1, answer[:, None])[places, 0]
    for choice in torch.eye(len(places)).split(at_once):
        parts = torch.autograd.grad(
            log_probs, parameters, choice, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )
        flat = (part.flatten(1).float().cpu() for part in parts)
        yield torch.cat(list(flat), 1) if not sketch else _sketch(flat, len(choice), sketch)


def _sketch(parts: Iterator[torch.Tensor], rows: int, size: int) -> torch.Tensor:
    sums = torch.zeros(rows, size)
    for seed, part in enumerate(parts):
        hashed = torch.Generator().manual_seed(seed)
        places = torch.randint(size, part.shape[1:], generator=hashed)
        signs = torch.randint(2, part.shape[1:], generator=hashed) * 2.0 - 1
        sums.index_add_(1, places, part * signs)
    return sums
