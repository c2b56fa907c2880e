"""Models whose head verl's fused kernels do not compute: they take hidden states · lm_head.weightᵀ and nothing else."""

from __future__ import annotations

from typing import Any

from verl_otb.errors import ConfigError

INSTEAD = "Set actor_rollout_ref.model.use_fused_kernels=False"
# What some models do to their logits after the head: soft cap (Gemma), division (Granite), factor (Cohere).
LEFT_OUT = ("final_logit_softcapping", "logits_scaling", "logit_scale")


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


def refuse_sharded(weight_is_sharded: bool) -> None:
    """Raise ConfigError where verl's fused forward meets a head that FSDP2 shards by itself."""
    if weight_is_sharded:
        raise ConfigError(
            "FSDP2 shards an untied head by itself, and verl's fused kernels read its weight without gathering it, so "
            "that a fused forward fails, with this plugin and without. Set actor_rollout_ref.actor.strategy=fsdp, or "
            f"{INSTEAD[0].lower()}{INSTEAD[1:]}"
        )


def check_fused(config: Any) -> None:
    """Refuse, before any worker exists, a model that cannot run with fused kernels and OTB.

    Args:
        config: the `actor_rollout_ref` section.

    Raises:
        ConfigError: the model's logits are more than its head's product, or its head is untied under FSDP2.
    """
    model = config.model
    if not model.get("use_fused_kernels", False):
        return
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    overrides = dict(model.get("override_config", None) or {})
    hf_config = AutoConfig.from_pretrained(
        copy_to_local(model.path),
        trust_remote_code=model.get("trust_remote_code", False),
        **{name: value for name, value in overrides.items() if name in (*LEFT_OUT, "tie_word_embeddings")},
    )
    refuse_left_out(hf_config)
    refuse_sharded(config.actor.strategy == "fsdp2" and not getattr(hf_config, "tie_word_embeddings", False))
