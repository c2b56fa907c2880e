"""The vocabulary split over real gloo ranks gives what one rank gives."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl_otb.kernels import sum_pi_squared, token_statistics

TOKENS, VOCABULARY = 9, 24_000


def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=random) * torch.linspace(0.5, 8, TOKENS)[:, None]
    logits[1, : VOCABULARY // 2] = -math.inf  # nothing on the first ranks
    logits[2] = -math.inf
    logits[3, 5] = math.nan
    logits[4, -5] = math.inf
    labels = torch.tensor([0, VOCABULARY - 1, 3, 4, 5, 11_999, 12_000, 7_000, 8_000])
    return logits, labels, torch.linspace(0.5, 2.0, TOKENS)


def on_a_rank(rank: int, ranks: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/meeting", rank=rank, world_size=ranks)
    logits, labels, temperature = whole()
    mine = logits.chunk(ranks, dim=-1)[rank]
    kept = mine.clone()
    everyone = dist.group.WORLD
    found = token_statistics(mine, labels, temperature=temperature, process_group=everyone)
    alone = sum_pi_squared(mine, temperature=temperature, process_group=everyone)
    assert torch.equal(mine.nan_to_num(), kept.nan_to_num())
    with pytest.raises(ValueError, match=rf"\[0, {VOCABULARY}\), found {VOCABULARY} at token 1"):
        token_statistics(mine, labels.clone().index_fill_(0, torch.tensor(1), VOCABULARY), process_group=everyone)
    with pytest.raises(ValueError, match="whole vocabulary on one rank"):
        sum_pi_squared(mine, impl="reference", process_group=everyone)
    torch.save((*found, alone), f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_split_over_ranks(tmp_path: Path, ranks: int):
    commands = [[sys.executable, __file__, str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert not any(child.returncode for child in children), "\n".join(errors)
    logits, labels, temperature = whole()
    truth = token_statistics(logits.double(), labels, temperature=temperature, impl="reference")
    for rank in range(ranks):
        *found, alone = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(alone.nan_to_num(7), found[2].nan_to_num(7))
        for ours, exact in zip(found, truth, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=2e-7, equal_nan=True)


if __name__ == "__main__":
    on_a_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
