"""Where a greedy output first differs from plain decoding's, and whether the dtype explains it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from experiments.contenders.base import OtherEngine
from experiments.measuring.jobs import Job
from experiments.results.lossless import promises_equality
from specdec.engine.engine import Engine
from specdec.exactness.ties import Tie, examine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FirstDifference:
    """The place where a greedy output leaves plain decoding's, as ``Record`` has it.

    Attributes:
        index: Number of the output token, from 0.
        tokens: The method's token and plain decoding's; None where that output has ended.
        texts: The two as text.
        margin: How far the lower of the two is below the largest logit there, in nats; None where there is no such
            number (one output has ended, or a token is impossible there).
        tie_bound: The largest margin that the dtype explains there, in nats; 0 on an invariant engine, which has
            no rounding to explain. None without a margin, and for a rule that is not exact and is therefore not judged.
    """

    index: int
    tokens: tuple[int | None, int | None]
    texts: tuple[str | None, str | None]
    margin: float | None
    tie_bound: float | None


def find_divergence(
    engine: Engine | OtherEngine, job: Job, tokens: Sequence[int], plain: Sequence[int], *, exactness: str | None
) -> FirstDifference | None:
    """Where an output first differs from plain decoding's, with the evidence; None where they are equal.

    The model runs again, in several pieces, only if they differ.

    Args:
        engine: The method's, which has nothing to do at the moment.
        job: What was decoded.
        tokens: The method's output.
        plain: Plain decoding's output.
        exactness: What the method's rule promises.
    """
    index = first_difference(tokens, plain)
    if index is None:
        return None
    pair = (_at(tokens, index), _at(plain, index))
    texts = (_text(engine, pair[0]), _text(engine, pair[1]))
    tie = _tie(engine, job, tokens[:index], pair, judged=promises_equality(exactness))
    return FirstDifference(index, pair, texts, tie.margin, tie.bound)


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two has ended; None if they are equal."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, plain, strict=False)))
    return None if same == len(tokens) == len(plain) else same


def _tie(
    engine: Engine | OtherEngine, job: Job, before: Sequence[int], pair: tuple[int | None, int | None], *, judged: bool
) -> Tie:
    ours, plains = pair
    if ours is None or plains is None:
        return Tie(None, None)
    invariant = isinstance(engine, Engine) and engine.runner.invariant
    try:
        tie = examine(
            engine.target.model,
            [*job.prompt_ids, *before],
            (ours, plains),
            job.sampling,
            prompt_length=len(job.prompt_ids),
            runner=engine.runner if isinstance(engine, Engine) else None,
            kv_cache=engine.runner.kv_cache if isinstance(engine, Engine) else None,
            bounded=judged and not invariant,
        )
    except Exception as error:  # the run of hours goes on; a divergence that nothing explains counts as a fault
        logger.warning(
            "the divergence on %s could not be examined, and counts as one that the dtype does not explain (%s: %s)",
            *(job.prompt.id, type(error).__name__, error),
        )
        return Tie(None, None)
    # An invariant engine computes the same logits for every method, so nothing is left for rounding to explain.
    return replace(tie, bound=0.0) if invariant and judged and tie.margin is not None else tie


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text(engine: Engine | OtherEngine, token: int | None) -> str | None:
    tokenizer = engine.target.tokenizer
    return None if token is None or tokenizer is None else str(tokenizer.decode([token]))
