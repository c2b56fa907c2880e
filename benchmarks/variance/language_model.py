"""Answers sampled from a causal language model, with what the estimators need of them, in plain torch.

Also the demo's task, and its model in training: the same settings as configs/otb_tiny_cpu.yaml, without verl, in
seconds, for those who want the model at some step of it and not the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_otb.core import optimal_token_advantages
from verl_otb.kernels import token_statistics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

Score = Callable[..., float]


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    ground_truth: str
    data_source: str = ""


@dataclass(frozen=True)
class Answers:
    """One answer a row, (rows, tokens), 0 after the end; `rewards`, (rows,), are for the whole answer."""

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    sum_pi_squared: torch.Tensor
    rewards: torch.Tensor

    @property
    def token_rewards(self) -> torch.Tensor:
        """The reward on the last token of each row, as verl has it."""
        rewards = torch.zeros(self.mask.shape, dtype=self.rewards.dtype)
        return rewards.scatter_(1, self.mask.long().sum(1, keepdim=True) - 1, self.rewards[:, None])


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], length: int, score: Score, generator: torch.Generator
) -> Answers:
    """Answer each prompt, all of one number of tokens, at temperature 1, with at most `length` tokens."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt.tokens for prompt in prompts], device=device)
    going, cache = torch.ones(len(prompts), dtype=torch.bool), None
    columns: list[tuple[torch.Tensor, ...]] = []
    while len(columns) < length and going.any():
        output = model(tokens, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[:, -1].double().cpu(), output.past_key_values
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        found = token_statistics(logits, chosen[:, 0], impl="reference")
        columns.append((chosen[:, 0] * going, going, found.log_probs * going, found.sum_pi_squared * going))
        going = going & (chosen[:, 0] != tokenizer.eos_token_id)
        tokens = chosen.to(device)
    answers, mask, log_probs, sum_pi_squared = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    texts = [
        tokenizer.decode(row[live], skip_special_tokens=True) for row, live in zip(answers, mask.bool(), strict=True)
    ]
    rewards = [
        score(prompt.data_source, text, prompt.ground_truth) for prompt, text in zip(prompts, texts, strict=True)
    ]
    return Answers(answers, mask, log_probs, sum_pi_squared, torch.tensor(rewards, dtype=torch.float64))


def response_log_probs(model: Any, prompts: Sequence[Prompt], answers: torch.Tensor) -> torch.Tensor:
    """log π over the vocabulary at each token of the answers, (rows, tokens, V), with a gradient."""
    start = torch.tensor([prompt.tokens for prompt in prompts])
    tokens = torch.cat([start, answers], 1).to(next(model.parameters()).device)
    return model(tokens).logits[:, start.shape[1] - 1 : -1].float().log_softmax(-1)


def encode(tokenizer: Any, messages: Any) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompts_of(tokenizer: Any, rows: Any) -> list[Prompt]:
    """The prompts of a table in verl's schema."""
    return [
        Prompt(encode(tokenizer, row["prompt"]), row["reward_model"]["ground_truth"], row.get("data_source", ""))
        for row in rows.to_dict("records")
    ]


def demo_task() -> tuple[Any, list[Prompt], Score]:
    """Tokenizer, training prompts and reward of the demo."""
    import make_tiny_task
    from arithmetic_reward import compute_score

    tokenizer = make_tiny_task.make_tokenizer()
    return tokenizer, prompts_of(tokenizer, make_tiny_task.make_rows(1024, "train")), compute_score


def demo_training(
    steps: Sequence[int], seed: int = 0, prompts_a_step: int = 8, n: int = 8
) -> Iterator[tuple[int, Any]]:
    """Train the demo's model with OTB, and give it before the first step after each of `steps`."""
    import make_tiny_task

    tokenizer, prompts, score = demo_task()
    model = make_tiny_task.make_model(tokenizer, tied_head=False, seed=seed).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    generator, order = torch.Generator().manual_seed(seed), random.Random(seed)
    uids = [prompt for prompt in range(prompts_a_step) for _ in range(n)]
    for step in range(max(steps) + 1):
        if step in steps:
            yield step, model
        if step == max(steps):
            return
        batch = [prompt for prompt in order.sample(prompts, prompts_a_step) for _ in range(n)]
        answers = sample(model, tokenizer, batch, 8, score, generator)
        advantages, _ = optimal_token_advantages(
            answers.token_rewards, answers.mask, answers.log_probs, answers.sum_pi_squared, uids
        )
        log_pi = response_log_probs(model, batch, answers.tokens)
        log_probs = log_pi.gather(-1, answers.tokens[..., None])[..., 0]
        entropy = -(log_pi.exp() * log_pi).sum(-1)
        loss = -((advantages * log_probs + 0.01 * entropy) * answers.mask).sum() / answers.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
