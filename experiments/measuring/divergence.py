"""Where a greedy output first differs from plain decoding's, and by what margin: a near-tie, or a bug."""

from collections.abc import Sequence
from itertools import takewhile

from transformers import PreTrainedModel

from experiments.measuring.jobs import Job
from specdec.exactness.reference import top_two_margin


def find_divergence(
    model: PreTrainedModel, job: Job, tokens: Sequence[int], plain: Sequence[int]
) -> tuple[int | None, float | None]:
    """The index of the first token that differs, and the margin there; both None where the outputs are equal.

    Args:
        model: The target.
        job: What was decoded.
        tokens: A method's output.
        plain: Plain decoding's output.

    Returns:
        The index; and the difference of the target's two largest logits at that place, in nats.
    """
    index = first_difference(tokens, plain)
    if index is None:
        return None, None
    sequence = (*job.prompt_ids, *tokens[:index])
    return index, top_two_margin(model, sequence, job.sampling.repetition_penalty)


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two has ended; None if they are equal."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, plain, strict=False)))
    return None if same == len(tokens) == len(plain) else same
