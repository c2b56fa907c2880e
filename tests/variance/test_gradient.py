"""Gradient variance of a language model: the inner products of token gradients, and what is estimated from them."""

import csv
from functools import reduce
from pathlib import Path

import gradient
import pytest
import torch
from group_estimates import (
    ESTIMATORS,
    Groups,
    Moments,
    advantages,
    correlations,
    draw_groups,
    estimates,
    largest_shares,
    moments,
)
from language_model import Answers, demo_task, demo_training, response_log_probs, sample
from token_gradients import TokenGradients, token_gradients

ROWS, BLOCKS = 32, 4
PIECES = 200


@pytest.fixture(scope="module")
def answered():
    """The demo's model after a few steps, a prompt, its answers and their inner products."""
    tokenizer, prompts, score = demo_task()
    (_, model), *_ = demo_training([2])
    answers = sample(model, tokenizer, prompts[:1] * ROWS, 4, score, torch.Generator().manual_seed(1))
    # Rewards that differ, and rows of different lengths: the demo's first answers have neither.
    answers.rewards.copy_(torch.linspace(0, 1, ROWS, dtype=torch.float64))
    for row in range(0, ROWS, 3):
        answers.mask[row, 1 + row % 3 :] = False
    return model, prompts[0], answers, token_gradients(model, prompts[0], answers)


def backward(model, prompt, tokens, factors) -> torch.Tensor:
    """Σ factors · ∂ log π/∂θ by a plain backward pass, flat."""
    log_pi = response_log_probs(model, [prompt] * len(tokens), tokens)
    model.zero_grad()
    (log_pi.gather(-1, tokens[..., None])[..., 0] * factors).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def test_answers_have_the_statistics_of_a_second_pass(answered):
    model, prompt, answers, _ = answered
    log_pi = response_log_probs(model, [prompt] * ROWS, answers.tokens).double()
    live = answers.mask
    torch.testing.assert_close(
        answers.log_probs[live], log_pi.gather(-1, answers.tokens[..., None])[..., 0][live], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(answers.sum_pi_squared[live], log_pi.exp().square().sum(-1)[live], atol=1e-5, rtol=0)


def test_group_norms_are_those_of_a_backward_pass(answered):
    model, prompt, answers, gradients = answered
    groups = draw_groups(ROWS, BLOCKS, 4, 1, torch.Generator().manual_seed(0))
    found = advantages(answers, gradients, groups)
    second = moments(answers, gradients, groups).second
    rows = groups.rows[groups.block == 1]
    for estimator in ("mean", "otb", "otb_loo"):
        index = ESTIMATORS.index(estimator)
        norms = [
            backward(model, prompt, answers.tokens[group], a / 4).square().sum()
            for group, a in zip(rows, found[index, groups.block == 1], strict=True)
        ]
        torch.testing.assert_close(second[index, 1], torch.stack(norms).mean(), rtol=1e-3, atol=0)


def test_products_between_blocks_are_those_of_their_mean_gradients(answered):
    model, prompt, answers, gradients = answered
    groups = draw_groups(ROWS, BLOCKS, 8, 1, torch.Generator().manual_seed(0))
    index = ESTIMATORS.index("otb")
    found = advantages(answers, gradients, groups)[index]
    mine = [backward(model, prompt, answers.tokens[groups.rows[block]], found[block] / 8) for block in range(BLOCKS)]
    centred = answers.rewards.view(BLOCKS, 8) - answers.rewards.view(BLOCKS, 8).mean(1, keepdim=True)
    true = [
        backward(model, prompt, tokens, a[:, None] * mask / 7)
        for tokens, a, mask in zip(answers.tokens.split(8), centred, answers.mask.split(8), strict=True)
    ]
    result = moments(answers, gradients, groups)
    scale = float(mine[0].norm() * true[0].norm())
    for a in range(BLOCKS):
        for b in range(BLOCKS):
            torch.testing.assert_close(result.own[index, a, b], mine[a] @ mine[b], rtol=1e-3, atol=1e-3 * scale)
            torch.testing.assert_close(result.true[index, a, b], mine[a] @ true[b], rtol=1e-3, atol=1e-3 * scale)
            torch.testing.assert_close(result.gradient[a, b], true[a] @ true[b], rtol=1e-3, atol=1e-3 * scale)


def test_path_norms_are_those_of_a_backward_pass(answered):
    model, prompt, answers, gradients = answered
    row = int(answers.mask.sum(1).argmax())
    norms = gradients.path_norms(answers.mask)[row]
    for end in range(1, int(answers.mask[row].sum()) + 1):
        factors = (torch.arange(answers.tokens.shape[1]) < end)[None]
        truth = backward(model, prompt, answers.tokens[row : row + 1], factors).square().sum()
        torch.testing.assert_close(norms[end - 1], truth, rtol=1e-3, atol=0)
    assert (gradients.path_norms(answers.mask)[~answers.mask] == 0).all()


def test_a_sketch_keeps_inner_products_but_for_its_own_noise(answered):
    model, prompt, answers, gradients = answered
    sketched = token_gradients(model, prompt, answers, sketch=16384, at_once=2).products
    norms = gradients.products.diagonal().sqrt()
    assert ((sketched - gradients.products) / torch.outer(norms, norms)).abs().max() < 0.1


def made(policy: torch.Tensor, scores: torch.Tensor, rows: int, seed: int) -> tuple[Answers, TokenGradients]:
    """Answers of two tokens from a policy of independent tokens, whose scores are known: (2, V, parameters)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.multinomial(p, rows, True, generator=generator) for p in policy], 1)
    log_probs = policy.log().gather(1, tokens.T).T
    rewards = (tokens[:, 0] == 0).double() + tokens[:, 1]
    squares = policy.square().sum(1).expand(rows, 2).clone()
    answers = Answers(tokens, torch.ones(rows, 2, dtype=torch.bool), log_probs, squares, rewards)
    flat = scores.flatten(0, 1)
    return answers, TokenGradients(flat @ flat.T, tokens + torch.tensor([0, policy.shape[1]]))


def test_estimates_of_a_small_policy_come_out_at_their_exact_values():
    """Three words, two independent tokens, softmax logits as parameters: everything is known in closed form."""
    policy = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    scores = torch.zeros(2, 3, 6, dtype=torch.float64)
    for token in range(2):
        scores[token, :, 3 * token : 3 * token + 3] = torch.eye(3) - policy[token]
    # Many prompts with few answers each: what is biased in the small does not average out.
    rows, blocks, n = 64, 8, 4
    groups = draw_groups(rows, blocks, n, 1, torch.Generator().manual_seed(0))
    pieces = [made(policy, scores, rows, seed) for seed in range(PIECES)]
    figures = estimates(reduce(Moments.__add__, (moments(*piece, groups) for piece in pieces)), n)
    answers, gradients = pieces[0]

    words = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    p = policy[0, words[:, 0]] * policy[1, words[:, 1]]
    reward = (words[:, 0] == 0).double() + words[:, 1]
    score = scores[0, words[:, 0]] + scores[1, words[:, 1]]
    true = (p * reward) @ score

    def exact(advantage):
        return (p * advantage.square()) @ score.square().sum(1) - true.square().sum()

    def close(name, estimator, expected):
        value, error = (part[ESTIMATORS.index(estimator)] for part in figures[name])
        assert abs(value - expected) < 4 * error, (name, estimator, float(value), float(error), float(expected))
        assert error < 0.1 * expected

    close("variance", "none", PIECES * exact(reward) / n)
    close("shrink", "mean", torch.tensor((n - 1) / n))
    for estimator in ("none", "rloo", "otb_loo", "carry_loo"):
        close("shrink", estimator, torch.tensor(1.0))
    ratio = figures["var_ratio"][0]
    assert ratio[ESTIMATORS.index("mean")] == 1
    torch.testing.assert_close(ratio[ESTIMATORS.index("rloo")], torch.tensor((n / (n - 1)) ** 2).double())
    torch.testing.assert_close(figures["noise_ratio"][0][ESTIMATORS.index("rloo")], torch.tensor(1.0).double())
    # Without bias the shrink is 1 and not what was measured.
    for estimator in ("none", "otb_loo", "token_loo", "carry_loo"):
        index = ESTIMATORS.index(estimator)
        expected = ratio[index] * ((n - 1) / n) ** 2
        torch.testing.assert_close(figures["noise_ratio"][0][index], expected)
        assert figures["shrink"][0][index] != 1
    # In this policy the proxies are the true norms, so both weights give the same.
    for proxy, truth in (("otb", "otb_true_norms"), ("token", "token_true_norms")):
        torch.testing.assert_close(ratio[ESTIMATORS.index(proxy)], ratio[ESTIMATORS.index(truth)], rtol=1e-5, atol=0)
    assert all(value == pytest.approx(1) for (_, column), value in correlations(answers, gradients).items() if column)


def test_groups_cut_every_block_whole():
    groups = draw_groups(32, 4, 4, 3, torch.Generator().manual_seed(0))
    assert groups.rows.shape == (24, 4)
    for block in range(4):
        chosen = groups.rows[groups.block == block]
        assert sorted(chosen.flatten().tolist()) == sorted(list(range(8 * block, 8 * block + 8)) * 3)
    with pytest.raises(ValueError, match="30 answers do not make 4 blocks of whole groups of 4"):
        draw_groups(30, 4, 4, 1, torch.Generator())


def test_largest_share_of_energy():
    """Three groups of two rows: a sure row beside one that is not, two alike, and one with equal rewards."""
    log_probs = torch.tensor([[-1e-9], [-3.0], [-1.0], [-1.0], [-1e-9], [-3.0]], dtype=torch.float64).expand(6, 2)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[3, 1] = False  # one live row is left there
    rewards = torch.tensor([0.0, 1, 0, 1, 1, 1], dtype=torch.float64)
    answers = Answers(mask.long(), mask, log_probs, log_probs.exp().square(), rewards)
    shares = largest_shares(answers, Groups(torch.arange(6).view(3, 2), torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(shares, torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64))


def test_moments_add_up_over_prompts(answered):
    _, _, answers, gradients = answered
    groups = draw_groups(ROWS, BLOCKS, 4, 2, torch.Generator().manual_seed(0))
    one = moments(answers, gradients, groups)
    assert isinstance(one + one, Moments)
    single, double = estimates(one, 4), estimates(one + one, 4)
    torch.testing.assert_close(double["variance"][0], 2 * single["variance"][0])
    torch.testing.assert_close(double["var_ratio"][0], single["var_ratio"][0])


def test_script_on_a_hugging_face_model(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import make_tiny_task

    make_tiny_task.main(tmp_path, tied_head=True)
    files = {"--model": "model", "--prompts": "val.parquet", "--out": "out"}
    given = [part for name, file in files.items() for part in (name, str(tmp_path / file))]
    few = "--rows 16 --blocks 2 --sizes 4 8 --times 2 --prompt-count 2 --length 3 --sketch 4096"
    gradient.main([*given, "--reward", str(examples / "arithmetic_reward.py"), *few.split()])
    for name in ("gradient", "gradient_seeds"):
        with open(tmp_path / "out" / f"{name}.csv") as file:
            lines = list(csv.DictReader(file))
        assert [(line["point"], line["n"], line["estimator"]) for line in lines] == [
            ("model", str(n), estimator) for n in (4, 8) for estimator in ESTIMATORS
        ]
    assert all(float(line["variance"]) > 0 for line in lines)
    assert (tmp_path / "out" / "gradient.png").stat().st_size > 10_000
    assert "model,path,all,2," in (tmp_path / "out" / "gradient_proxy.csv").read_text()


def test_summary_over_the_seeds():
    def line(seed, estimator, ratio, shrink):
        about = {"point": "step 1", "seed": seed, "n": 4, "estimator": estimator, "reward": 0.5, "length": 2.0}
        return about | {"largest_share": 0.25, "var_ratio": ratio, "shrink": shrink, "noise_ratio": ratio / shrink**2}

    given = [line(0, "otb", 0.5, 0.5), line(0, "rloo", 1.0, 1.0), line(1, "otb", 2.0, 1.0), line(1, "rloo", 1.0, 1.0)]
    otb, rloo = gradient.summary(given)
    assert (otb["estimator"], rloo["estimator"], otb["seeds"]) == ("otb", "rloo", 2)
    assert [otb[f"var_ratio{end}"] for end in ("", "_min", "_max")] == pytest.approx([1.0, 0.5, 2.0])
    assert [otb[f"shrink{end}"] for end in ("", "_min", "_max")] == pytest.approx([0.75, 0.5, 1.0])
    assert [otb[f"noise_ratio{end}"] for end in ("", "_min", "_max")] == pytest.approx([2.0, 2.0, 2.0])
