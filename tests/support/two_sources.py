"""A reward for each data source of a batch: one pays 1, the other 10."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Whether half of the characters are ASCII: of a random model's answers about half, so groups without a difference
    are not rare."""
    share = sum(character.isascii() for character in solution_str) / max(len(solution_str), 1)
    return {"ones": 1.0, "tens": 10.0}[data_source] * (share >= 0.5)
