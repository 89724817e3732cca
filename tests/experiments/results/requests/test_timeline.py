"""What follows from the timestamps of one request, by hand; and wrong definitions that must not give the same."""

from fractions import Fraction

import numpy as np
import pytest

from experiments.results.records import Record
from experiments.results.requests.timeline import Timeline, timeline_of

# Admitted after 1 s, prefilled after 2; one token at 3, three at 4, two at 6.
EXAMPLE = Timeline(arrived=0.0, admitted=1.0, prefilled=2.0, emissions=((3.0, 1), (4.0, 3), (6.0, 2)), finished=6.0)


def test_a_request_by_hand() -> None:
    assert EXAMPLE.tokens == 6
    assert (EXAMPLE.queue, EXAMPLE.ttft, EXAMPLE.engine_ttft, EXAMPLE.e2e) == (1.0, 3.0, 2.0, 6.0)
    assert EXAMPLE.tpot == 3 / 5
    assert EXAMPLE.chunk_gaps == (1.0, 2.0)
    assert EXAMPLE.token_gaps == (1 / 3, 1 / 3, 1 / 3, 1.0, 1.0)
    assert EXAMPLE.phases == {"queue": 1.0, "prefill": 1.0, "decode": 4.0}
    assert EXAMPLE.in_order


# What other tools report under the same names. Each differs from ours on the example.
MUTANTS = {
    "TPOT over N tokens": (lambda line: (line.finished - line.emissions[0][0]) / line.tokens, lambda line: line.tpot),
    "TPOT with the first token": (lambda line: (line.finished - line.arrived) / line.tokens, lambda line: line.tpot),
    "gaps by chunk as gaps by token": (lambda line: line.chunk_gaps, lambda line: line.token_gaps),
    "mean gap by chunk as TPOT": (lambda line: sum(line.chunk_gaps) / len(line.chunk_gaps), lambda line: line.tpot),
    "TTFT without the queue": (lambda line: line.first_token - line.admitted, lambda line: line.ttft),
    "TTFT as prefill": (lambda line: line.prefilled - line.arrived, lambda line: line.ttft),
    "e2e from admission": (lambda line: line.finished - line.admitted, lambda line: line.e2e),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_definitions_are_told_apart(name: str) -> None:
    wrong, right = MUTANTS[name]
    assert wrong(EXAMPLE) != right(EXAMPLE)


def exact_timelines(count: int) -> list[Timeline]:
    """Requests with moments that are fractions, so that identities can be exact."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        moments = [Fraction(int(each), 1000) for each in np.cumsum(rng.integers(1, 500, size=rng.integers(4, 12)))]
        emissions = tuple((moment, int(rng.integers(1, 6))) for moment in moments[3:])
        made.append(
            Timeline(
                arrived=moments[0],  # type: ignore[arg-type]
                admitted=moments[1],  # type: ignore[arg-type]
                prefilled=moments[2],  # type: ignore[arg-type]
                emissions=emissions,  # type: ignore[arg-type]
                finished=moments[-1],  # type: ignore[arg-type]
            )
        )
    return [line for line in made if line.tokens > 1]


def test_from_arrival_to_end_is_ttft_and_the_other_tokens_exactly() -> None:
    lines = exact_timelines(50)
    for line in lines:
        assert line.ttft is not None and line.tpot is not None
        assert line.e2e == line.ttft + (line.tokens - 1) * line.tpot
        assert line.e2e == sum(line.phases.values())
        assert sum(line.chunk_gaps) == sum(line.token_gaps) == line.finished - line.first_token  # type: ignore[operator]
        assert len(line.token_gaps) == line.tokens - line.emissions[0][1]
    # TTFT + N · TPOT, as some sources have it, is wrong wherever tokens came after the first delivery.
    several = [line for line in lines if line.tpot]
    assert len(several) > 30
    assert all(line.e2e != line.ttft + line.tokens * line.tpot for line in several)  # type: ignore[operator]


def test_one_token_has_no_time_per_further_token() -> None:
    line = Timeline(arrived=0.0, admitted=0.0, prefilled=1.0, emissions=((2.0, 1),), finished=2.0)
    assert (line.tpot, line.ttft, line.e2e, line.chunk_gaps, line.token_gaps) == (None, 2.0, 2.0, (), ())


def test_what_never_ended_has_no_latency() -> None:
    line = Timeline(arrived=0.0, admitted=0.0, prefilled=1.0, emissions=((2.0, 1),), finished=None)
    assert (line.tpot, line.e2e, line.phases, line.ttft) == (None, None, {}, 2.0)
    none = Timeline(arrived=0.0, admitted=0.0, prefilled=1.0, emissions=(), finished=None)
    assert (none.ttft, none.engine_ttft, none.first_token, none.tokens) == (None, None, None, 0)


@pytest.mark.parametrize(("name", "value"), [("admitted", -0.5), ("prefilled", 0.5), ("finished", 5.0)])
def test_an_impossible_order_is_noticed(name: str, value: float) -> None:
    moments = {name: getattr(EXAMPLE, name) for name in ("arrived", "admitted", "prefilled", "emissions", "finished")}
    assert not Timeline(**moments | {name: value}).in_order  # type: ignore[arg-type]


def test_a_record_without_moments_has_no_timeline() -> None:
    record = Record(prompt="a", method="m", temperature=0.0, batch=0, prompt_tokens=3, finish_reason="stop")
    assert timeline_of(record) is None
