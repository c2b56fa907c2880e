"""A reward for each data source of a batch: one pays in shares of 1, the other in tens."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Share of ASCII characters in the answer, times 10 in the source `tens`."""
    share = sum(character.isascii() for character in solution_str) / max(len(solution_str), 1)
    return share * {"ones": 1, "tens": 10}[data_source]
