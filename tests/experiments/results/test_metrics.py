"""Every metric, and every token's source, against what was worked out by hand."""

import pytest

from experiments.reporting.run_tables import not_recorded, utilization_table
from experiments.results import metrics
from experiments.results.frame import frame_of
from experiments.results.records import Source, sourced
from experiments.results.rows import positions
from experiments.results.timing import utilization_of
from specdec.types import Step
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import output


def step(accepted: int, depth: int, *, nodes: int = 0, tokens: int = 0, **more: object) -> Step:
    drafted = {"accepted": accepted, "proposed_depth": depth, "proposed_nodes": nodes or depth}
    return Step(request=0, round=0, token_ids=tuple(range(tokens)), **drafted, **more)


of = metrics.of_steps

# Accepted 2 of 3, 0 of 3, 1 of 1 and nothing of nothing.
STEPS = [
    step(2, 3, nodes=7, tokens=3),
    step(0, 3, nodes=7, tokens=1),
    step(1, 1, tokens=2),
    step(0, 0, tokens=1),
]


def test_the_mean_length_counts_the_next_token_and_no_cut() -> None:
    assert metrics.mean_acceptance_length(of(STEPS)) == pytest.approx((3 + 1 + 2 + 1) / 4)
    assert metrics.mean_acceptance_length(of([step(3, 3, tokens=2, finish_reason="stop")])) == 4
    # The rate is over depth, not nodes.
    assert metrics.draft_acceptance_rate(of(STEPS)) == pytest.approx(3 / 7)
    assert metrics.draft_acceptance_rate(of([step(0, 0)])) is None


def test_acceptance_by_position() -> None:
    by = metrics.acceptance_by_position(of(STEPS))
    # Position 1 was drafted in three rounds and accepted in two; 2 and 3 were drafted in two rounds.
    assert positions(by, "rounds_at") == [3, 2, 2]
    assert positions(by) == pytest.approx([2 / 3, 1 / 2, 0.0])
    # Of the two rounds that drafted position 2, one had accepted position 1, and it accepted 2 as well.
    assert positions(by, "conditional_acceptance_at") == pytest.approx([2 / 3, 1.0, 0.0])


def test_rounds_that_ended_in_an_error_decided_nothing() -> None:
    failed = step(3, 3, finish_reason="error")
    assert metrics.mean_acceptance_length(of([*STEPS, failed])) == metrics.mean_acceptance_length(of(STEPS))
    # The request goes on, without the drafts that were at fault.
    redone = step(0, 3, error="not finite")
    assert metrics.mean_acceptance_length(of([*STEPS, redone])) == metrics.mean_acceptance_length(of(STEPS))
    assert metrics.mean_acceptance_length(of([failed])) is None
    assert metrics.acceptance_by_position(of([failed])) == {}


def test_stage_seconds_counts_a_shared_round_once() -> None:
    shared = {"draft": 1.0, "verify": 2.0}
    # The second round took exactly as long, but it is another one.
    steps = [step(0, 1, seconds=each) for each in (shared, shared, dict(shared) | {"commit": 0.5})]
    assert metrics.stage_seconds(steps) == {"draft": 2.0, "verify": 4.0, "commit": 0.5}


A, R, B, E, T = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.EITHER, Source.TARGET


@pytest.mark.parametrize(
    ("rounds", "leaf", "sources"),  # rounds: accepted, depth and nodes of what was drafted
    [
        ([(2, 2, 2), (0, 2, 2)], (), [A, A, B, R]),
        ([(0, 0, 0), (0, 0, 0)], (), [T, T]),
        ([(1, 2, 5)], (), [A, E]),
        ([(2, 2, 5)], (), [A, A, B]),
        ([(1, 2, 5), (1, 2, 5)], (True, False), [A, B, A, R]),
        ([(0, 0, 0)], (True,), [T]),
    ],
)
def test_a_token_has_its_source(rounds: list[tuple[int, int, int]], leaf: tuple[bool, ...], sources: list) -> None:
    accepted, depth, nodes = zip(*rounds, strict=True)
    found = sourced(output(tokens=len(sources), accepted=accepted, proposed_depth=depth, proposed_nodes=nodes), leaf)
    assert [(token.token, token.source) for token in found] == list(enumerate(sources))


def test_the_last_round_may_be_cut() -> None:
    found = sourced(output(tokens=4, accepted=(2, 3), proposed_depth=(3, 3), proposed_nodes=(3, 3)))
    assert [(token.round, token.depth, token.source) for token in found] == [(0, 1, A), (0, 2, A), (0, 3, R), (1, 1, A)]


PEAKS = {"copy": 80.0, "read": 100.0, "flops": 1000.0, "cache_bytes": 0.0}
WORK = {
    "verify_bytes": 300.0, "verify_flops": 2000.0, "verify_forwards": 2.0, "useful_flops": 500.0,
    "verified": 8.0, "committed": 6.0,
}  # fmt: skip


def test_utilization_is_counted_by_hand() -> None:
    records = [output(method="plain", seconds=10.0, stage_seconds={"verify": 8.0, "prefill": 1.0}, work=WORK)]
    found = utilization_of(frame_of(records), PEAKS)
    # 300 bytes in 8 s of 100 bytes/s, 2000 operations of 1000/s; the least time is that of the bytes.
    assert (found["mbu.verify"], found["mfu.verify"]) == (pytest.approx(300 / 800), pytest.approx(2000 / 8000))
    assert found["of_least.verify"] == pytest.approx(8 / 3)
    assert found["useful_mfu"] == pytest.approx(500 / 8000) and found["wasted"] == pytest.approx(1 - 6 / 8)
    table = utilization_table(run_of(records, planned=1, series=1, peaks=PEAKS))
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [["plain", "verify", "38%", "25%", "2.67"]]
    assert utilization_table(run_of(records, planned=1, series=1)) is None


def test_stages_that_failed_to_be_recorded_are_named_once() -> None:
    failed = {"refused": {"commit": ["RuntimeError: operation not permitted"]}, "by_design": {}}
    fine = {"refused": {}, "by_design": {"requests have logits processors": 9}}
    assert not_recorded({"plain": failed, "medusa": failed, "other": fine}) == [
        "plain, medusa: not recorded, so that it ran slower: commit (RuntimeError: operation not permitted)"
    ]
