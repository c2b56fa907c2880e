"""What the estimators refuse, and what the error says: field, first row and column, uid, and what to do."""

import numpy as np
import pytest
import torch
from random_batches import ALIGNMENTS

from verl_otb.core import optimal_token_advantages
from verl_otb.errors import InputError

NAN, INF = torch.nan, torch.inf


def good_batch():
    """Three rows of four tokens; the last token of each row is masked, and all of row 2."""
    return {
        "token_level_rewards": torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]),
        "response_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]),
        "old_log_probs": torch.full((3, 4), -1.0),
        "sum_pi_squared": torch.full((3, 4), 0.5),
        "rollout_is_weights": torch.ones(3, 4),
        "index": np.array(["p0", "p1", "p1"], dtype=object),
    }


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("token_level_rewards", NAN, "expected a finite number, found nan"),
        ("token_level_rewards", INF, "expected a finite number, found inf"),
        ("token_level_rewards", -INF, "expected a finite number, found -inf"),
        ("old_log_probs", NAN, "expected finite, ≤ 0.001, found nan"),
        ("old_log_probs", -INF, "expected finite, ≤ 0.001, found -inf"),
        ("old_log_probs", 1.1e-3, "expected finite, ≤ 0.001, found 0.0011"),
        ("sum_pi_squared", NAN, "expected finite, ≥ -1e-05 and ≤ 1.001, found nan"),
        ("sum_pi_squared", INF, "found inf"),
        ("sum_pi_squared", -1.1e-5, "found -1.1e-05"),
        ("sum_pi_squared", 1.0011, "found 1.0011"),
        ("rollout_is_weights", NAN, "expected finite, ≥ 0, found nan"),
        ("rollout_is_weights", INF, "expected finite, ≥ 0, found inf"),
        ("rollout_is_weights", -1e-6, "found -1e-06"),
        ("response_mask", 0.5, "expected 0 or 1, found 0.5"),
        ("response_mask", 2, "expected 0 or 1, found 2"),
        ("response_mask", -1, "expected 0 or 1, found -1"),
        ("response_mask", NAN, "expected 0 or 1, found nan"),
    ],
)
def test_a_bad_value(align, field, value, says):
    batch = good_batch()
    batch[field] = batch[field].float() if isinstance(value, float) else batch[field]
    batch[field][1, 2] = value
    batch[field][1, 1] = value
    with pytest.raises(InputError) as caught:
        optimal_token_advantages(**batch, align=align)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.field, error.row, error.column, error.uid) == (field, 1, 1, "p1")
    message = str(error)
    assert message.startswith(f"{field}: expected ")
    assert says in message
    assert "at row 1, column 1, uid 'p1' (2 in 1 of 3 rows). " in message
    assert len(message.split("rows). ")[1]) > 20, "it has to say what to do"


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("old_log_probs", 1e-3),
        ("old_log_probs", -1e4),
        ("sum_pi_squared", -1e-5),
        ("sum_pi_squared", 1.001),
        ("rollout_is_weights", 0.0),
        ("rollout_is_weights", 3e38),
        ("token_level_rewards", -1e30),
    ],
)
def test_a_value_at_its_bound(align, field, value):
    batch = good_batch()
    batch[field] = batch[field].double()
    batch[field][0, 1] = value
    advantages, returns = optimal_token_advantages(**batch, align=align)
    assert advantages.isfinite().all()
    assert returns.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_in_half_precision(dtype):
    """The bound is not rounded with the values: the first value above it is bad, in finding it and in saying so."""
    batch = good_batch()
    batch["old_log_probs"] = batch["old_log_probs"].to(dtype)
    bad = torch.tensor(1e-3, dtype=dtype)
    if bad.double() <= 1e-3:
        bad = (bad.view(torch.int16) + 1).view(dtype)  # the next value up
    batch["old_log_probs"][0, 0] = bad
    with pytest.raises(InputError, match="old_log_probs"):
        optimal_token_advantages(**batch)


@pytest.mark.parametrize("column", [0, 3])
def test_a_reward_under_a_masked_token_counts(column):
    """Before the row's first unmasked token, where no advantage would show it, as after its last."""
    batch = good_batch()
    batch["response_mask"][0, column] = 0
    batch["token_level_rewards"][0, column] = NAN
    says = rf"token_level_rewards: .* found nan at row 0, column {column}, uid 'p0'"
    with pytest.raises(InputError, match=says):
        optimal_token_advantages(**batch)


def test_a_fully_masked_row_is_not_read():
    batch = good_batch()
    expected = optimal_token_advantages(**batch)
    for field in ("token_level_rewards", "old_log_probs", "sum_pi_squared", "rollout_is_weights"):
        batch[field][2] = NAN
    for ours, theirs in zip(optimal_token_advantages(**batch), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_rewards_that_overflow_together():
    batch = good_batch()
    batch["token_level_rewards"][0] = 2e38
    says = r"token_level_rewards: expected a sum that float32 can hold, found 8e\+38 at row 0, column 0"
    with pytest.raises(InputError, match=says):
        optimal_token_advantages(**batch)


def test_rewards_that_overflow_in_the_middle_of_a_row():
    batch = good_batch()
    batch["token_level_rewards"][0, :3] = torch.tensor([-3e38, 3e38, 3e38])
    with pytest.raises(InputError, match=r"token_level_rewards: expected a sum that float32 can hold"):
        optimal_token_advantages(**batch)


def test_a_bad_value_late_in_a_large_batch():
    """In the last of several blocks, with its groups interleaved: the position is the batch's."""
    rows, tokens = 4096, 256
    batch = {
        "token_level_rewards": torch.zeros(rows, tokens),
        "response_mask": torch.ones(rows, tokens, dtype=torch.int64),
        "old_log_probs": torch.full((rows, tokens), -1.0),
        "sum_pi_squared": torch.full((rows, tokens), 0.5),
        "index": [row % 512 for row in range(rows)],
    }
    batch["sum_pi_squared"][4095, 200] = NAN
    with pytest.raises(InputError, match=r"sum_pi_squared: .* at row 4095, column 200, uid 511"):
        optimal_token_advantages(**batch)


@pytest.mark.parametrize("field", ["response_mask", "old_log_probs", "sum_pi_squared", "rollout_is_weights"])
def test_shapes_that_disagree(field):
    batch = good_batch()
    batch[field] = batch[field][:, :3]
    expected = rf"{field}: expected \(3, 4\), the shape of token_level_rewards, found \(3, 3\)"
    with pytest.raises(InputError, match=expected) as caught:
        optimal_token_advantages(**batch)
    assert caught.value.field == field
    assert caught.value.row is None


@pytest.mark.parametrize("shape", [(4,), (3, 4, 1), (0, 4), (3, 0)])
def test_shapes_that_no_batch_has(shape):
    batch = {name: x.new_zeros(shape) for name, x in good_batch().items() if name != "index"}
    says = r"token_level_rewards: expected \(rows, tokens\), at least one of each, found"
    with pytest.raises(InputError, match=says):
        optimal_token_advantages(**batch, index=["a"] * shape[0])


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (["a", "b"], "one uid for each of 3 rows, found 2"),
        (np.array(["a"] * 4), "one uid for each of 3 rows, found 4"),
        (None, "an array of one uid a row, found NoneType"),
        ("abc", "an array of one uid a row, found str"),
        (np.array("a"), "an array of one uid a row, found ndarray"),
    ],
)
def test_an_index_that_does_not_fit(index, says):
    with pytest.raises(InputError, match=f"index: expected {says}"):
        optimal_token_advantages(**good_batch() | {"index": index})


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("sum_pi_squared", r"found NoneType. Set actor_rollout_ref.actor.calculate_sum_pi_squared=True\."),
        ("old_log_probs", "found NoneType. They come from the actor's forward pass"),
        ("response_mask", r"found NoneType\.$"),
    ],
)
def test_missing_inputs(field, says):
    with pytest.raises(InputError, match=f"{field}: expected a tensor, {says}"):
        optimal_token_advantages(**good_batch() | {field: None})


MATRIX = torch.full((3, 4), 0.5)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("token_level_rewards", MATRIX.numpy(), "expected a tensor, found ndarray"),
        ("response_mask", MATRIX.numpy(), "expected a tensor, found ndarray"),
        ("old_log_probs", MATRIX.tolist(), "expected a tensor, found list"),
        ("token_level_rewards", MATRIX[0], r"expected \(rows, tokens\), at least one of each, found \(4,\)"),
        ("sum_pi_squared", MATRIX[0], r"expected \(rows, tokens\), at least one of each, found \(4,\)"),
        ("old_log_probs", MATRIX.long(), "expected a floating point tensor, found torch.int64"),
        ("sum_pi_squared", MATRIX.bool(), "expected a floating point tensor, found torch.bool"),
        ("rollout_is_weights", MATRIX.int(), "expected a floating point tensor, found torch.int32"),
        ("old_log_probs", MATRIX.cfloat(), "expected a floating point tensor, found torch.complex64"),
        ("token_level_rewards", MATRIX.cfloat(), "expected a real tensor, found torch.complex64"),
        ("response_mask", MATRIX.cfloat(), "expected a real tensor, found torch.complex64"),
        ("old_log_probs", torch.nested.nested_tensor(list(MATRIX)), "expected a padded .* found a nested one"),
        (
            "token_level_rewards",
            torch.nested.nested_tensor(list(MATRIX), layout=torch.jagged),
            "expected a padded .* found a nested one",
        ),
        ("sum_pi_squared", MATRIX.to_sparse(), "expected a padded .* found a torch.sparse_coo one"),
        ("old_log_probs", MATRIX.to("meta"), "expected on cpu, where token_level_rewards are, found on meta"),
    ],
)
def test_wrong_types(field, value, says):
    with pytest.raises(InputError, match=f"{field}: {says}") as caught:
        optimal_token_advantages(**good_batch() | {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_rewards_and_masks_of_any_real_type(dtype):
    batch = good_batch()
    expected = optimal_token_advantages(**batch)
    for field in ("token_level_rewards", "response_mask"):
        for ours, theirs in zip(
            optimal_token_advantages(**batch | {field: batch[field].to(dtype)}), expected, strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("nan", [NAN, np.float32("nan"), torch.tensor(NAN), ("p", NAN), {"p": [np.array(NAN)]}])
def test_a_uid_that_is_nan(nan):
    """It is equal to nothing, itself included: each row would be a group of its own, without a word."""
    with pytest.raises(
        InputError, match=r"index: expected uids .* found nan at row 1\. .* the uid of its prompt"
    ) as caught:
        optimal_token_advantages(**good_batch() | {"index": ["p0", nan, nan]})
    assert (caught.value.field, caught.value.row) == ("index", 1)


def test_an_alignment_that_is_not_there():
    with pytest.raises(InputError, match='align: expected "position" or "token", found \'turn\''):
        optimal_token_advantages(**good_batch(), align="turn")
