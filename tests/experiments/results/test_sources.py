"""Every token of an output has the source that its round gives it."""

import pytest

from experiments.results.sources import Source, sourced
from tests.experiments.results.outputs import output

A, R, B, E, T = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.EITHER, Source.TARGET


@pytest.mark.parametrize(
    ("accepted", "depth", "nodes", "leaf", "sources"),
    [
        ((2, 0), (2, 2), (2, 2), (), [A, A, B, R]),
        ((0, 0), (0, 0), (0, 0), (), [T, T]),
        ((1,), (2,), (5,), (), [A, E]),
        ((2,), (2,), (5,), (), [A, A, B]),
        ((1, 1), (2, 2), (5, 5), (True, False), [A, B, A, R]),
        ((0,), (0,), (0,), (True,), [T]),
    ],
)
def test_a_token_has_its_source(
    accepted: tuple[int, ...], depth: tuple[int, ...], nodes: tuple[int, ...], leaf: tuple[bool, ...], sources: list
) -> None:
    found = sourced(output(tokens=len(sources), accepted=accepted, proposed_depth=depth, proposed_nodes=nodes), leaf)
    assert [token.source for token in found] == sources
    assert [token.token for token in found] == list(range(len(sources)))


def test_rounds_and_depths_are_counted_and_the_last_round_may_be_cut() -> None:
    found = sourced(output(tokens=4, accepted=(2, 3), proposed_depth=(3, 3), proposed_nodes=(3, 3)))
    assert [(token.round, token.depth, token.source) for token in found] == [(0, 1, A), (0, 2, A), (0, 3, R), (1, 1, A)]
