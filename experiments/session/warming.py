"""The prompts that warm up what is measured, as tokens."""

from collections.abc import Sequence

from experiments.datasets.prompt import Prompt
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams
from specdec.target.target import Target


def encode_warmup(
    texts: list[str], target: Target, sampling: SamplingParams, max_length: int, *, most: int | None = None
) -> list[list[int]]:
    """Warm-up prompts as tokens, cut where they are too long, or longer than what is measured (``most``)."""
    room = min(max_length - sampling.max_new_tokens, most or max_length)
    encoded = [list(encode_prompt(target.tokenizer, text))[:room] for text in texts]
    return [ids for ids in encoded if ids]


def one_length(prompts: Sequence[Prompt]) -> int | None:
    """The number of tokens of which no prompt has more; None where prompts are not cut to a length.

    Kernels prepare themselves for a shape when they first meet it: prompts of this length warm up what is measured.
    """
    lengths = [prompt.last_tokens for prompt in prompts]
    return max(length or 0 for length in lengths) if all(lengths) else None
