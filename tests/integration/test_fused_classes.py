"""verl's fused forward of each class of models, torch backend: Σπ² of what that model itself says, and what is refused.

The classes are real and small, with random weights; vision-language models get text.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from tensordict import TensorDict
from verl_config import OTB, verl_config

from verl_otb.errors import ConfigError
from verl_otb.integration import engine
from verl_otb.integration.engine import ASK, FIELD
from verl_otb.integration.heads import check_fused

VOCABULARY, TEMPERATURE = 96, 0.7
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
FUSED = {
    "Qwen3": TEXT,
    "Llama": TEXT,
    "Qwen3Moe": {**TEXT, **EXPERTS},
    "Mixtral": {**TEXT, "num_local_experts": 4},
    "Qwen2_5_VL": {"text_config": {**TEXT, **ROPE}, "vision_config": VISION},
    "Qwen3VL": {"text_config": {**TEXT, **ROPE}, "vision_config": {**VISION, "deepstack_visual_indexes": [0]}},
    "Qwen3VLMoe": {
        "text_config": {**TEXT, **ROPE, **EXPERTS}, "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
    },
    "Qwen3_5": {
        "text_config": {**TEXT, **ROPE, "layer_types": ["full_attention"] * 2}, "vision_config": VISION,
    },
    "Glm4v": {"text_config": {**TEXT, **ROPE}, "vision_config": VISION},
}  # fmt: skip


def build(name, config):
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(config), tie_word_embeddings=True)
    kind = "ForConditionalGeneration" if hasattr(config, "vision_config") else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name + kind)(config).eval()


@pytest.fixture(params=FUSED)
def model(request):
    """With verl's fused forward, which is taken out of its class again afterwards."""
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    built = build(request.param, FUSED[request.param])
    stock = type(built).forward
    built.stock_forward = stock.__get__(built)
    patch_forward_with_backends(built, use_fused_kernels=True, fused_kernels_backend="torch")
    assert type(built).forward is not stock
    yield built
    type(built).forward = stock


@torch.no_grad()
def test_sum_pi_squared_is_that_of_the_model_s_own_logits(model):
    from verl.utils import tensordict_utils as tu

    tokens = torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    vision = hasattr(model.config, "vision_config")  # verl puts the text's positions before the three of images
    positions = torch.arange(11).expand(4, 2, -1) if vision else torch.arange(11).expand(2, -1)
    inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False, "return_dict": True}
    micro_batch = TensorDict({}, batch_size=2)
    tu.assign_non_tensor(micro_batch, use_fused_kernels=True, **{ASK: True})

    def forward(self, micro_batch):
        out = self.module(**inputs, temperature=TEMPERATURE)
        return out, engine._found_in_head()

    out, found = engine.forward_step(forward, SimpleNamespace(module=model), micro_batch)
    log_pi = (model.stock_forward(**inputs).logits.double() / TEMPERATURE).log_softmax(-1)
    labels = tokens.roll(-1, -1)
    truth = {
        FIELD: log_pi.exp().square().sum(-1),
        "log_probs": log_pi.gather(-1, labels[..., None]).squeeze(-1),
        "entropy": -(log_pi.exp() * log_pi).sum(-1),
    }
    assert truth[FIELD].max() > 2 / VOCABULARY, "this model says nothing"
    for name, values in {FIELD: found, "log_probs": out.log_probs, "entropy": out.entropy}.items():
        torch.testing.assert_close(values.double(), truth[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0.*leave out"),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, "logits_scaling=8.0.*leave out"),
        ("CohereForCausalLM", {}, "logit_scale=0.0625.*leave out"),
        ("FalconH1ForCausalLM", {"lm_head_multiplier": 0.5}, "lm_head_multiplier=0.5.*leave out"),
        ("RecurrentGemmaForCausalLM", {}, "logits_soft_cap=30.0.*leave out"),
        ("PhiForCausalLM", {}, "lm_head of PhiForCausalLM has a bias"),
        ("GPTNeoXForCausalLM", {}, "GPTNeoXForCausalLM has no lm_head"),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": False}, "FSDP2 shards an untied head"),
        ("Qwen2_5_VLForConditionalGeneration", {"tie_word_embeddings": False}, "FSDP2 shards an untied head"),
    ],
)
def test_refused_before_any_worker(tmp_path, name, config, message):
    save(tmp_path, name, **config)
    with pytest.raises(ConfigError, match=f"{message}.*use_fused_kernels=False"):
        check_fused(fused_config(tmp_path))


def test_a_class_that_verl_never_fuses_is_refused(tmp_path, monkeypatch):
    """Kimi-VL comes with code of its own from the hub; another class stands in for it."""
    save(tmp_path, "Qwen3ForCausalLM")
    monkeypatch.setattr(transformers.Qwen3Config, "model_type", "kimi_vl")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: transformers.Qwen3Config())
    with pytest.raises(ConfigError, match="no true fused forward for model type kimi_vl"):
        check_fused(fused_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("Qwen3ForCausalLM", ["actor_rollout_ref.actor.strategy=fsdp"]),
        ("Qwen3ForCausalLM", ["+actor_rollout_ref.model.override_config.tie_word_embeddings=true"]),
        ("Qwen3MoeForCausalLM", ["actor_rollout_ref.actor.strategy=fsdp"]),
        ("Qwen3VLForConditionalGeneration", []),  # verl gathers their heads
        ("Qwen3_5ForConditionalGeneration", []),
    ],
)
def test_accepted(tmp_path, name, overrides):
    save(tmp_path, name, tie_word_embeddings=False)
    check_fused(fused_config(tmp_path, *overrides))


def test_qwen3_vl_s_triton_forward_does_not_gather(tmp_path):
    save(tmp_path, "Qwen3VLForConditionalGeneration", tie_word_embeddings=False)
    triton = "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton"
    with pytest.raises(ConfigError, match="FSDP2 shards an untied head"):
        check_fused(fused_config(tmp_path, triton))


def save(directory, name, **config):
    kind = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    getattr(transformers, f"{kind}Config")(architectures=[name], **config).save_pretrained(directory)


def fused_config(path, *overrides):
    return verl_config(
        *OTB,
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.actor.strategy=fsdp2",
        *overrides,
    ).actor_rollout_ref
