"""One tensor parallel rank of verl's Megatron head, for tests/contract/test_megatron.py.

Megatron is not installable here. verl's own code is real: its tensor parallel functions and the engine's one method
that hooks touch, taken out of a wheel by syntax tree. Of Megatron there is the group, and its cross entropy in its
plainest form.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import wrapt
from tensordict import TensorDict
from wheels import classes, methods

ROWS, TOKENS, VOCABULARY = 2, 5, 4_096
MODULE, ENGINE = "verl.workers.engine.megatron.transformer_impl", "MegatronEngineWithLMHead"


def provide_megatron() -> None:
    megatron, core = ModuleType("megatron"), ModuleType("megatron.core")
    core.parallel_state = SimpleNamespace(get_tensor_model_parallel_group=lambda: dist.group.WORLD)
    core.tensor_parallel = SimpleNamespace(vocab_parallel_cross_entropy=cross_entropy)
    sys.modules.update({"megatron": megatron, "megatron.core": core})


def cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(vocab_parallel_logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, vocab_parallel_logits)
    return -torch.cat(parts, -1).float().log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)


def engine_module(root: Path) -> ModuleType:
    """A module of the engine's name, with its vocab_parallel_* globals and its _lm_head_logits_processor."""
    functions: dict[str, object] = {"__name__": "verl.utils.megatron.tensor_parallel"}
    exec(
        compile((root / "verl/utils/megatron/tensor_parallel.py").read_text(), "tensor_parallel.py", "exec"), functions
    )
    engine = classes(root, MODULE)[ENGINE]
    engine.bases, engine.decorator_list = [], []
    engine.body = [methods(engine)["_lm_head_logits_processor"]]
    module = ModuleType(MODULE)
    vars(module).update(torch=torch, Callable=Callable, TensorDict=TensorDict)
    vars(module).update({name: value for name, value in functions.items() if name.startswith("vocab_parallel")})
    exec(compile(ast.Module([engine], []), "transformer_impl.py", "exec"), vars(module))
    return module


def one_rank(rank: int, ranks: int, port: int, root: Path) -> None:
    from verl.utils import tensordict_utils as tu

    from verl_otb.integration import patching
    from verl_otb.integration.engine import ASK, FIELD

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    provide_megatron()
    module = sys.modules[MODULE] = engine_module(root)
    verl_s_own = module.vocab_parallel_sum_pi_squared
    patching.install()
    wrapt.notify_module_loaded(module)  # what the import system does after an import
    ours = ("engine.megatron_logits", "engine.megatron_sum_pi_squared")
    assert [patching.status()[hook] for hook in ours] == ["in", "in"]

    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, TOKENS, VOCABULARY, generator=generator)
    logits[0, 0, 7] = 60  # one token has all the probability
    logits = logits.bfloat16()
    labels = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    temperature = torch.rand(ROWS, TOKENS, generator=generator) + 0.5
    engine = getattr(module, ENGINE)()
    engine.engine_config = SimpleNamespace(entropy_from_logits_with_chunking=False)

    def forward(*, calculate_sum_pi_squared: bool = False, **flags: bool) -> dict[str, torch.Tensor]:
        batch = TensorDict({}, batch_size=ROWS)
        tu.assign_non_tensor(batch, **flags)
        return engine._lm_head_logits_processor(
            logits.chunk(ranks, -1)[rank].clone(),
            labels,
            temperature.clone(),
            calculate_sum_pi_squared=calculate_sum_pi_squared,
            calculate_entropy=True,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=batch,
            data_format="bshd",
        )

    stock, asked = forward(), forward(**{ASK: True})
    assert FIELD not in stock
    for name in ("log_probs", "entropy"):
        assert torch.equal(asked[name], stock[name])
    scaled = logits / temperature.unsqueeze(-1).to(logits.dtype)  # verl divides in the logits' dtype
    truth = scaled.double().softmax(-1).square().sum(-1)
    assert asked[FIELD].dtype == torch.float32
    torch.testing.assert_close(asked[FIELD].double(), truth, atol=1e-6, rtol=1e-6)
    # verl's flag without OTB stays verl's, bit for bit.
    assert torch.equal(
        forward(calculate_sum_pi_squared=True)[FIELD], verl_s_own(scaled.chunk(ranks, -1)[rank].contiguous())
    )
    assert not torch.allclose(verl_s_own(scaled.chunk(ranks, -1)[rank]).double(), truth, atol=1e-4, rtol=0)
    dist.destroy_process_group()
