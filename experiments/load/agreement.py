"""Whether methods under load decode the same greedy outputs as plain decoding."""

from collections.abc import Sequence

from experiments.load.run import DONE, LoadRun
from experiments.load.texts import Asked
from experiments.results.frame import Figures
from specdec.checks.ties import examine
from specdec.target.target import Target

MOST = 64
"""Differences of a run that are examined, as the model runs again for each."""


def agreement(run: LoadRun, plain: LoadRun, asked: Sequence[Asked], target: Target) -> Figures | None:
    """Compare the outputs of greedy requests that both runs have finished.

    Returns:
        How many were ``compared``, and are ``equal``. The others part at ``near_ties``, which the dtype's rounding
        explains, or are ``unexplained``, also where one ends before the other; ``not_examined`` are beyond ``MOST``.
        ``largest_margin``: the largest distance of two tokens at which outputs parted, in nats. None where nothing can
        be compared.
    """
    pairs = [_outputs(each) for each in (run, plain)]
    both = sorted(number for number in pairs[0].keys() & pairs[1].keys() if asked[number].sampling.greedy)
    apart = [number for number in both if pairs[0][number] != pairs[1][number]]
    if not both:
        return None
    ties, margins = 0, []
    for number in apart[:MOST]:
        ours, theirs = (own[number] for own in pairs)
        place = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
        if place is None:
            continue
        each = asked[number]
        tie = examine(
            target.model,
            [*each.prompt_ids, *ours[:place]],
            (ours[place], theirs[place]),
            each.sampling,
            prompt_length=len(each.prompt_ids),
        )
        if tie.margin is not None and tie.bound is not None:
            margins.append(tie.margin)
            ties += tie.margin <= tie.bound
    return Figures(
        compared=len(both),
        equal=len(both) - len(apart),
        near_ties=ties,
        unexplained=len(apart[:MOST]) - ties,
        not_examined=len(apart[MOST:]),
        largest_margin=max(margins, default=None),
    )


def _outputs(run: LoadRun) -> dict[int, tuple[int, ...]]:
    """Return the outputs by request, without those whose tokens have no names."""
    done = run.requests[run.requests.outcome == DONE]
    found = {int(number): tuple(map(int, tokens)) for number, tokens in zip(done.request, done.tokens, strict=True)}
    return {number: tokens for number, tokens in found.items() if min(tokens, default=0) >= 0}
