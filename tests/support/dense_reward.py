"""A reward of which even a random model gets some, and not the same for every answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Share of ASCII characters in the answer."""
    return sum(character.isascii() for character in solution_str) / max(len(solution_str), 1)
