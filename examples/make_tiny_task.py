"""Make a tiny task for verl in a few seconds, without a download: model, tokenizer, data.

    python examples/make_tiny_task.py OUT_DIR [--tied-head] [--seed 0]

OUT_DIR/model: a random two-layer Qwen3 of 0.1 M parameters and a tokenizer of bytes. Its head is a matrix of its own,
or with --tied-head the embedding, as verl's fused kernels need it under FSDP2.
OUT_DIR/train.parquet, OUT_DIR/val.parquet: sums of two numbers below ten, in verl's schema.
The reward is in arithmetic_reward.py. The same call makes the same files; the seed is that of the model's weights.
"""

import argparse
import random
from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 0
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, no merges, and the special tokens of ChatML: 260 in all."""
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(bytes_as_text)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, tied_head: bool, seed: int = SEED) -> Qwen3ForCausalLM:
    # The vocabulary has exactly the tokenizer's tokens: verl masks any others in vLLM only, and then the log-probs
    # of rollout and actor differ by log(vocabulary / tokens) in an untrained model.
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM's attention for the CPU takes
            max_position_embeddings=1024,
            tie_word_embeddings=tied_head,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).to(torch.float32)


def make_rows(count: int, split: str) -> pandas.DataFrame:
    rng = random.Random(f"{SEED} {split}")
    rows = []
    for index in range(count):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        rows.append(
            {
                "data_source": "tiny/addition",
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return pandas.DataFrame(rows)


def main(out_dir: Path, tied_head: bool, seed: int = SEED) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out_dir / "model")
    make_model(tokenizer, tied_head, seed).save_pretrained(out_dir / "model")
    make_rows(1024, "train").to_parquet(out_dir / "train.parquet")
    make_rows(16, "val").to_parquet(out_dir / "val.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny task for verl: model, tokenizer, data.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--tied-head", action="store_true", help="the embedding is the head")
    parser.add_argument("--seed", type=int, default=SEED, help="of the model's weights")
    main(**vars(parser.parse_args()))
