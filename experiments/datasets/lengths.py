"""Lengths of prompts that are cut to one."""


def check_lengths(tokens: int, longest: int) -> None:
    """Refuse lengths that no prompt can have.

    Args:
        tokens: Of the prompts.
        longest: Of the same places, or joined prompts, in a whole study.

    Raises:
        ValueError: One is below what it has to be.
    """
    if tokens < 1:
        raise ValueError(f"dataset.tokens={tokens}: give at least 1")
    if longest < tokens:
        raise ValueError(f"dataset.longest={longest}: give at least dataset.tokens={tokens}")
