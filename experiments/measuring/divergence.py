"""Where a greedy output first differs from plain decoding's, and whether the dtype explains it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.contenders.base import OtherEngine
from experiments.measuring.jobs import Job
from experiments.results.lossless import promises_equality
from specdec.checks.ties import Tie, examine
from specdec.engine.engine import Engine

logger = logging.getLogger(__name__)


def find_divergence(
    engine: Engine | OtherEngine, job: Job, tokens: Sequence[int], plain: Sequence[int], *, exactness: str | None
) -> dict[str, Any]:
    """Return where an output first differs from plain decoding's, with the evidence; empty where they are equal.

    The model runs again, in several pieces, only if they differ.

    Args:
        engine: The method's, which has nothing to do at the moment.

    Returns:
        Fields of ``Record``. ``margin``: how far the lower of the two tokens is below the largest logit there, in nats;
        None where there is no such number (one output has ended, or a token is impossible there). ``tie_bound``: the
        largest margin that the dtype explains there, in nats; 0 on an invariant engine, which has no rounding to
        explain; None without a margin, and for a rule that is not exact and is therefore not judged.
    """
    longest = max(len(tokens), len(plain))
    pairs = zip(*([*given, *[None] * (longest - len(given))] for given in (tokens, plain)), strict=True)
    different = [(index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]]
    if not different:
        return {}
    index, pair = different[0]
    tokenizer = engine.target.tokenizer
    tie = _tie(engine, job, tokens[:index], pair, judged=promises_equality(exactness))
    return {
        "divergence": index,
        "tokens_at_divergence": pair,
        "texts_at_divergence": tuple(
            None if token is None or tokenizer is None else str(tokenizer.decode([token])) for token in pair
        ),
        "margin": tie.margin,
        "tie_bound": tie.bound,
    }


def _tie(
    engine: Engine | OtherEngine, job: Job, before: Sequence[int], pair: tuple[int | None, int | None], *, judged: bool
) -> Tie:
    ours, plains = pair
    if ours is None or plains is None:
        return Tie(None, None)
    runner = engine.runner if isinstance(engine, Engine) else None
    invariant = runner is not None and runner.invariant
    try:
        tie = examine(
            engine.target.model,
            [*job.prompt_ids, *before],
            (ours, plains),
            job.sampling,
            prompt_length=len(job.prompt_ids),
            runner=runner,
            kv_cache=None if runner is None else runner.kv_cache,
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
