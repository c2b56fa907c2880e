"""Models whose head verl's fused kernels do not compute: they take hidden states · lm_head.weightᵀ and nothing else.

All are refused in the trainer's process, before any worker exists: their log-probs would be another model's, or their
first forward would fail after the first rollout.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_otb.errors import ConfigError

INSTEAD = "Set actor_rollout_ref.model.use_fused_kernels=False"
# What models of transformers do to their logits after the head: soft caps (Gemma, RecurrentGemma, xLSTM, NanoChat),
# division (Granite), factors (Cohere, FalconH1). 1 and None are no change.
LEFT_OUT = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)
# Classes for which verl leaves the stock forward in place whatever use_fused_kernels says (Kimi-VL), or whose forward
# writes over some of the logits (Chameleon).
NEVER_FUSED = ("kimi_vl", "chameleon")
SHARDS_THE_HEAD = ("fsdp2", "fsdp_turbo")
# Fused forwards that gather the weight of a head that FSDP2 shards by itself, and the backends in which they do.
GATHERED = {
    "qwen3_vl": ("torch", "liger"),
    "qwen3_vl_moe": ("torch", "liger"),
    "qwen3_5": ("torch", "liger", "triton"),
    "qwen3_5_moe": ("torch", "liger", "triton"),
}


def refuse_left_out(hf_config: Any) -> None:
    """Raise ConfigError if the model's logits are more than its head's product."""
    text = hf_config.get_text_config()
    for name in LEFT_OUT:
        value = getattr(text, name, None)
        if value not in (None, 1):
            raise ConfigError(
                f"this model's logits go through {name}={value}, which verl's fused kernels leave out, so log-probs "
                f"and Σπ² would be another model's. {INSTEAD}"
            )


def refuse_head(model: torch.nn.Module) -> None:
    """Raise ConfigError if the model's head is not a product alone, or not where verl's fused forwards look for it."""
    head = getattr(model, "lm_head", None)
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} has no lm_head, which is where verl's fused kernels take the head's weight from, "
            f"so that a fused forward fails, with this plugin and without. {INSTEAD}"
        )
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"the lm_head of {type(model).__name__} has a bias, which verl's fused kernels leave out, so log-probs "
            f"and Σπ² would be another model's. {INSTEAD}"
        )


def refuse_sharded(weight_is_sharded: bool) -> None:
    """Raise ConfigError where verl's fused forward meets a head that FSDP2 shards by itself."""
    if weight_is_sharded:
        raise ConfigError(
            "FSDP2 shards an untied head by itself, and verl's fused kernels read its weight without gathering it, so "
            "that a fused forward fails, with this plugin and without. Set actor_rollout_ref.actor.strategy=fsdp, or "
            f"{INSTEAD[0].lower()}{INSTEAD[1:]}"
        )


def check_fused(config: Any) -> None:
    """Refuse a model that cannot run with fused kernels and OTB.

    Args:
        config: the `actor_rollout_ref` section.

    Raises:
        ConfigError: see the table of heads in README.md.
    """
    if not config.model.get("use_fused_kernels", False):
        return
    hf_config = _model_config(config.model)
    refuse_left_out(hf_config)
    if hf_config.model_type in NEVER_FUSED:
        raise ConfigError(f"verl has no true fused forward for model type {hf_config.model_type}. {INSTEAD}")
    if (model := _without_weights(hf_config, config.model)) is not None:
        refuse_head(model)
    backend = (config.model.get("fused_kernel_options", None) or {}).get("impl_backend", "torch")
    gathered = backend in GATHERED.get(hf_config.model_type, ())
    untied = not getattr(hf_config, "tie_word_embeddings", False)
    refuse_sharded(config.actor.strategy in SHARDS_THE_HEAD and untied and not gathered)


def _model_config(model: Any) -> Any:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    overrides = dict(model.get("override_config", None) or {})
    return AutoConfig.from_pretrained(
        copy_to_local(model.path),
        trust_remote_code=model.get("trust_remote_code", False),
        **{name: value for name, value in overrides.items() if name in (*LEFT_OUT, "tie_word_embeddings")},
    )


def _without_weights(hf_config: Any, model: Any) -> torch.nn.Module | None:
    """The model that verl will load, without memory for its weights; None if its code cannot do without."""
    from verl.utils.model import get_hf_auto_model_class

    try:
        with torch.device("meta"):
            return get_hf_auto_model_class(hf_config).from_config(
                hf_config, trust_remote_code=model.get("trust_remote_code", False)
            )
    except Exception:  # whatever a model's own code does on the meta device; the worker judges it then
        return None
