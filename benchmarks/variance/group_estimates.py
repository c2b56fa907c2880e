"""Variance, shrink and their errors, of estimators of the policy gradient from groups of N answers to one prompt.

A group's gradient is ĝ = 1/N Σ_i Σ_t A_t ∂ log π(a_t)/∂θ, and the estimators differ in A. Var is E‖ĝ − E ĝ‖², over all
parameters, the prompt held fixed. The answers of a prompt are cut into blocks, and groups are drawn within blocks many
times over; products of means of two different blocks are free of bias, and leaving out one block at a time (jackknife)
gives the errors. Several prompts are summed up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from language_model import Answers
from options import ESTIMATORS as BY_OPTIONS
from token_gradients import TokenGradients

from verl_otb.core import optimal_baseline, optimal_token_baseline, realized_energy, token_energy

SHIPPED = ("otb", "otb_no_zero_tail", "otb_loo", "token", "token_loo", "carry", "carry_loo")
ESTIMATORS = ("none", "mean", "rloo", "opo", *SHIPPED, "otb_true_norms", "token_true_norms")
# Without the own row in its baseline the expected gradient is the true one, whatever was sampled.
UNBIASED = {"none", "rloo", "otb_loo", "token_loo", "carry_loo"}


@dataclass(frozen=True)
class Groups:
    """`rows`, (groups, N), are numbers of answers; `block`, (groups,), is where they were drawn."""

    rows: torch.Tensor
    block: torch.Tensor


def draw_groups(rows: int, blocks: int, n: int, times: int, generator: torch.Generator) -> Groups:
    """Cut each block into groups of `n`, `times` times over."""
    size = rows // blocks
    if rows % blocks or size % n:
        raise ValueError(f"{rows} answers do not make {blocks} blocks of whole groups of {n}")
    orders = torch.stack([torch.randperm(size, generator=generator) for _ in range(blocks * times)])
    block = torch.arange(blocks).repeat(times)
    return Groups((orders + block[:, None] * size).reshape(-1, n), block.repeat_interleave(size // n))


def advantages(answers: Answers, gradients: TokenGradients, groups: Groups) -> torch.Tensor:
    """A of every estimator, (estimators, groups, N, tokens), float64, 0 after the end."""
    rows = groups.rows
    mask, reward = answers.mask[rows].double(), answers.rewards[rows][..., None]
    length = mask.sum(-1, keepdim=True)
    group_mean, n = reward.mean(1, keepdim=True), rows.shape[1]
    found = {
        "none": reward * mask,
        "mean": (reward - group_mean) * mask,
        "rloo": (reward - group_mean) * mask * n / (n - 1),
        "opo": (reward - (length * reward).sum(1, keepdim=True) / length.sum(1, keepdim=True)) * mask,
    }
    flat = rows.flatten()
    batch = [field[flat] for field in (answers.token_rewards, answers.mask, answers.log_probs, answers.sum_pi_squared)]
    uids = torch.arange(len(rows)).repeat_interleave(n).tolist()
    for name in SHIPPED:
        found[name] = optimal_token_baseline(*batch, uids, **BY_OPTIONS[name]).advantages.double().view(mask.shape)
    for name, norms in (("otb_true_norms", gradients.path_norms), ("token_true_norms", gradients.token_norms)):
        weights = norms(answers.mask)[rows].clamp(min=0)  # rounding, where the gradient vanishes
        found[name] = (reward - optimal_baseline(reward * mask, weights, -answers.mask[rows].long())) * mask
    return torch.stack([found[name] for name in ESTIMATORS])


def largest_shares(answers: Answers, groups: Groups) -> torch.Tensor:
    """The largest row's share of the energy ΣW_t, of each group whose rewards differ and each token with two live rows.

    1/N where all rows have the same energy. The advantages of a column sum to 0 with the energies as weights, so a row
    with nearly all of it has nearly no advantage.
    """
    energy = token_energy(answers.log_probs, answers.sum_pi_squared) * answers.mask
    realized = (realized_energy(energy) * answers.mask)[groups.rows]
    rewards = answers.rewards[groups.rows]
    chosen = (rewards.amax(1) > rewards.amin(1))[:, None] & (answers.mask[groups.rows].sum(1) >= 2)
    return (realized.amax(1) / realized.sum(1))[chosen]


@dataclass(frozen=True)
class Moments:
    """Of each estimator (e) and block (b), summed over prompts.

    Attributes:
        second: mean ‖ĝ‖² of the block's groups, (e, b).
        own: ⟨mean ĝ of b, mean ĝ of b'⟩, (e, b, b').
        true: ⟨mean ĝ of b, an unbiased gradient from all answers of b'⟩, (e, b, b').
        gradient: the product of two such unbiased gradients, (b, b').
    """

    second: torch.Tensor
    own: torch.Tensor
    true: torch.Tensor
    gradient: torch.Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.second + other.second, self.own + other.own, self.true + other.true, self.gradient + other.gradient
        )


def moments(answers: Answers, gradients: TokenGradients, groups: Groups) -> Moments:
    """Of the answers to one prompt."""
    products, which = gradients.products, gradients.which
    blocks, n = int(groups.block.max()) + 1, groups.rows.shape[1]
    factors = (advantages(answers, gradients, groups) / n).flatten(2)
    tokens = which[groups.rows].flatten(1)
    norms = torch.cat(
        [
            torch.einsum("egi,gij,egj->eg", some, products[ids[:, :, None], ids[:, None, :]], some)
            for some, ids in zip(factors.split(64, 1), tokens.split(64), strict=True)
        ],
        1,
    )
    groups_a_block = len(groups.block) // blocks
    ones = torch.nn.functional.one_hot(groups.block, blocks).double() / groups_a_block
    # The mean gradient of each block, as factors of the different tokens.
    means = torch.zeros(len(ESTIMATORS), blocks, len(products), dtype=torch.float64)
    for block in range(blocks):
        chosen = groups.block == block
        means[:, block].index_add_(1, tokens[chosen].flatten(), factors[:, chosen].flatten(1) / groups_a_block)
    rows = answers.rewards.view(blocks, -1)
    centred = (rows - rows.mean(1, keepdim=True)) / (rows.shape[1] - 1)
    whole = torch.zeros(blocks, len(products), dtype=torch.float64)
    per_token = centred.flatten()[:, None] * answers.mask
    for block, (ids, values) in enumerate(zip(which.chunk(blocks), per_token.chunk(blocks), strict=True)):
        whole[block].index_add_(0, ids.flatten(), values.flatten().double())
    projected = means @ products
    return Moments(norms @ ones, projected @ means.mT, projected @ whole.T, whole @ products @ whole.T)


def estimates(moments: Moments, n: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each figure with its standard error, (estimators,), of groups of `n`.

    variance: Var. var_ratio: over that of the group mean. shrink: ⟨E ĝ, g⟩/‖g‖², and cosine: of E ĝ and g, both as
    measured, also where they are known to be 1. noise_ratio: Var/shrink² over that of the group mean, the ratio after
    a change of learning rate that makes up for the shrink; there the shrink is the known one of those without bias
    and of the mean.
    """
    blocks = moments.second.shape[1]
    everything = torch.arange(blocks)
    whole = _figures(moments, n, everything)
    left_out = [_figures(moments, n, everything[everything != block]) for block in range(blocks)]
    result = {}
    for name, value in whole.items():
        values = torch.stack([figures[name] for figures in left_out])
        result[name] = (value, ((blocks - 1) * values.var(0, correction=0)).sqrt())
    return result


def _figures(moments: Moments, n: int, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
    def of_pairs(products: torch.Tensor) -> torch.Tensor:
        """The mean over pairs of different blocks."""
        chosen = products[..., blocks, :][..., blocks]
        total = chosen.sum((-1, -2)) - chosen.diagonal(dim1=-2, dim2=-1).sum(-1)
        return total / (len(blocks) * (len(blocks) - 1))

    variance = moments.second[:, blocks].mean(1) - of_pairs(moments.own)
    along, gradient = of_pairs(moments.true), of_pairs(moments.gradient)
    measured = along / gradient
    shrink = measured.clone()
    for name, known in {"mean": (n - 1) / n, **dict.fromkeys(UNBIASED, 1.0)}.items():
        shrink[ESTIMATORS.index(name)] = known
    # Of lengths that are too small to be measured, as at the start of a training, there is no cosine.
    cosine = along / (of_pairs(moments.own) * gradient).clamp(min=0).sqrt()
    mean = ESTIMATORS.index("mean")
    noise = variance / shrink.square()
    return {
        "variance": variance, "var_ratio": variance / variance[mean], "shrink": measured,
        "cosine": torch.where(cosine.isfinite(), cosine, torch.nan), "noise_ratio": noise / noise[mean],
    }  # fmt: skip


def correlations(answers: Answers, gradients: TokenGradients, least: int = 8) -> dict[tuple[str, int], float]:
    """Pearson's correlation of the logits' proxy with the true norm over the answers to one prompt.

    Keyed by what ("path": W_t; "token": w_t) and the column, from 1; column 0 has all columns together. The baseline
    of a column compares the rows of that column. Columns with fewer than `least` live rows, or where either is the
    same in all rows, are left out.
    """
    live = answers.mask.bool()
    energy = token_energy(answers.log_probs, answers.sum_pi_squared) * live
    pairs = {
        "path": (realized_energy(energy), gradients.path_norms(answers.mask)),
        "token": (energy, gradients.token_norms(answers.mask)),
    }
    found = {}
    for what, (proxy, truth) in pairs.items():
        for column in range(live.shape[1] + 1):
            chosen = live if column == 0 else live & (torch.arange(live.shape[1]) == column - 1)
            x, y = proxy[chosen], truth[chosen]
            if len(x) >= least and x.std() > 1e-9 * x.mean() and y.std() > 1e-9 * y.mean():
                found[what, column] = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    return found
