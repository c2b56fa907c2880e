"""Several turns with a tool, by verl's own tool agent loop: rows with tool output in them, and rows that went wrong."""

import itertools
from dataclasses import dataclass

import pytest
import verl_run
from otb_runs import (
    DENSE_REWARD,
    assert_sum_pi_squared_is_the_policy_s,
    assert_trained_on_the_estimator_s,
    checkpoints,
    model_before,
    probe,
    probed,
    real_rows,
)
from transformers import AutoTokenizer
from verl_run import STEPS

pytestmark = pytest.mark.e2e

LONGEST = 112  # tokens of a response: up to four turns
ODD_CALLS = verl_run.REPOSITORY / "tests" / "support" / "odd_calls.py"


@pytest.fixture(scope="module")
def multi_turn(tiny_task, tmp_path_factory):
    directory = tmp_path_factory.mktemp("multi_turn")
    return verl_run.run_verl(
        "algorithm.adv_estimator=tir_optimal_token_baseline",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.format=odd_token",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ODD_CALLS}",
        f"data.max_response_length={LONGEST}",
        "actor_rollout_ref.rollout.max_model_len=160",
        "actor_rollout_ref.rollout.n=8",
        DENSE_REWARD,
        *checkpoints(directory),
        task=tiny_task,
        directory=directory,
        env=probed(directory, "rollout_faults"),
    )


@dataclass
class Row:
    tokens: list[int]
    mask: list[int]
    returns: list[float]
    reward: float

    @property
    def parts(self):
        """Where the mask is constant: [(1, the model's turn), (0, what the tool said), (1, the next turn), ...]."""
        places = itertools.groupby(range(len(self.mask)), key=self.mask.__getitem__)
        return [(value, [self.tokens[place] for place in part]) for value, part in places]

    @property
    def turns(self):
        return [tokens for value, tokens in self.parts if value]


@pytest.fixture(scope="module")
def rows(multi_turn):
    """The rows of every step, without those that verl pads a batch with where a session failed."""
    rows = []
    for step in range(1, STEPS + 1):
        fields = real_rows(probe(multi_turn.directory, step))
        names = ("responses", "response_mask", "returns", "rm_scores")
        for columns in zip(*(fields[name] for name in names), strict=True):
            tokens, mask, returns, scores = (column.tolist() for column in columns)
            rows.append(Row(tokens, mask, returns, reward=scores[-1]))
    return rows


def test_trains(multi_turn):
    assert len(multi_turn.metrics) == STEPS
    for line in multi_turn.metrics:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_trained_on_are_the_estimator_s(multi_turn, step):
    assert_trained_on_the_estimator_s(probe(multi_turn.directory, step), align="token")


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_sum_pi_squared_is_the_policy_s(multi_turn, tiny_task, step):
    assert_sum_pi_squared_is_the_policy_s(
        probe(multi_turn.directory, step), model_before(multi_turn.directory, step, tiny_task.model)
    )


def test_masks_have_holes_and_the_holes_are_the_calculator_s_output(rows, tiny_task):
    from odd_calls import call

    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    holes = 0
    for row in rows:
        for (_, turn), (masked, output) in itertools.pairwise(row.parts):
            if masked == 0:
                base, exponent = call(turn)
                message = f"<|im_start|>tool\n{base**exponent}<|im_end|>\n<|im_start|>assistant\n"
                assert tokenizer.decode(output) == message
                holes += 1
    assert holes >= len(rows) / 4
    assert any(len(row.turns) >= 3 for row in rows)
    assert max(len(row.tokens) for row in rows) == LONGEST


def test_rows_cut_by_the_longest_length(rows):
    from odd_calls import call, opening

    assert any(row.parts[-1][0] and call(row.turns[-1]) for row in rows), "no tool output cut off"
    assert any(len(row.tokens) == LONGEST and opening(row.turns[-1]) and not call(row.turns[-1]) for row in rows), (
        "no call cut off"
    )


def test_rows_of_one_token_and_rows_that_end_in_tool_output(rows):
    """The reward of a row that ends in tool output lies on a masked token, and counts for the tokens before it."""
    assert any(len(row.tokens) == 1 for row in rows)
    unanswered = [row for row in rows if row.parts[-1][0] == 0]
    assert len(unanswered) >= STEPS
    for row in unanswered:
        assert row.reward > 0
        assert {value for value, mask in zip(row.returns, row.mask, strict=True) if mask} == {row.reward}


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_an_empty_response_costs_its_row_alone(multi_turn, step):
    """verl cannot store it, and fills the batch up; the other rows of its prompt are trained on."""
    fields = probe(multi_turn.directory, step)
    padding = [uid.startswith("pad") for uid in fields["uid"]]
    assert sum(padding) == 2
    for is_padding, advantages in zip(padding, fields["advantages"], strict=True):
        assert bool(advantages.any()) is not is_padding
