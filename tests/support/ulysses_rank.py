"""One rank of a Ulysses group, for tests/integration/test_ulysses.py: what it gathers must be the whole's."""

from types import SimpleNamespace

import torch
from tensordict import TensorDict

LENGTHS, VOCABULARY, PAD = [5, 8, 4], 23, 1  # 17 tokens, padded to 18, 9 a rank


def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, next tokens and temperatures of the padded packed sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS) + PAD
    logits = torch.randn(tokens, VOCABULARY, generator=generator) * 3
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return logits, labels, torch.rand(tokens, generator=generator) + 0.5


def one_rank(rank: int, port: int) -> None:
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_otb.integration.engine import ASK, FIELD

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    logits, labels, temperature = whole()
    half = slice(rank * len(logits) // 2, (rank + 1) * len(logits) // 2)
    engine = SimpleNamespace(use_ulysses_sp=True)
    engine._gather_and_unpad_packed = FSDPEngineWithLMHead._gather_and_unpad_packed.__get__(engine)
    rows = list(torch.zeros(sum(LENGTHS), dtype=torch.int64).split(LENGTHS))
    micro_batch = TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(LENGTHS)
    )
    tu.assign_non_tensor(micro_batch, use_remove_padding=True, calculate_entropy=True, **{ASK: True})
    out = FSDPEngineWithLMHead.prepare_model_outputs(
        engine,
        SimpleNamespace(logits=logits[half].unsqueeze(0)),
        {
            "input_ids_rmpad_rolled": labels[half],
            "temperature_rmpad": temperature[half],
            "pad_size": PAD,
        },
        micro_batch,
        None,
    )
    log_pi = (logits / temperature[:, None]).double().log_softmax(-1)[:-PAD]
    truth = {
        "log_probs": log_pi.gather(-1, labels[:-PAD, None]).squeeze(-1),
        "entropy": -(log_pi.exp() * log_pi).sum(-1),
        FIELD: log_pi.exp().square().sum(-1),
    }
    assert out.keys() == truth.keys()
    for name, expected in truth.items():
        assert out[name].offsets().diff().tolist() == LENGTHS
        torch.testing.assert_close(out[name].values().double(), expected, atol=2e-6, rtol=0)
    dist.destroy_process_group()
