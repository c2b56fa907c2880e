"""The reward of the tiny arithmetic task (make_tiny_task.py), in the form that verl calls."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Compare the answer with the sum, place by place.

    Each place pays 1 for the right digit, 1/4 for a wrong digit, 0 for anything else; the mean is taken over the
    places of the longer of the two, so every character too many or too few costs. 1.0 is the exact sum, nothing
    before it or after it.
    """
    paid = sum(
        1.0 if found == expected else 0.25
        for found, expected in zip(solution_str, ground_truth, strict=False)
        if found in "0123456789"
    )
    return paid / max(len(solution_str), len(ground_truth))
