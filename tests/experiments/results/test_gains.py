"""Gains of one method over another, by hand."""

from dataclasses import replace

import pytest

from experiments.results.gains import gain_over
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize

QUICK = Bootstrap(resamples=200)


def record(prompt: str, method: str, expected: tuple[float, ...], **more: object) -> Record:
    fields: dict[str, object] = {
        "prompt": prompt,
        "method": method,
        "exactness": None if method == "plain" else "exact",
        "temperature": 1.0,
        "batch": 0,
        "prompt_tokens": 5,
        "token_ids": (1, 2, 3),
        "finish_reason": "length",
        "seconds": 1.0,
        "accepted": (0,) * len(expected),
        "expected_accepted": expected,
        "proposed_depth": (3,) * len(expected),
        "proposed_nodes": (3,) * len(expected),
    }
    return Record(**fields | more)  # type: ignore[arg-type]


CHAIN = [record("a", "chain", (1.0, 2.0)), record("b", "chain", (0.5,))]
TREE = [record("a", "tree", (2.0,)), record("b", "tree", (1.0, 1.0))]


def test_a_gain_is_of_totals_over_the_prompts_that_both_have() -> None:
    gain = gain_over(TREE, CHAIN, QUICK)
    assert gain is not None and gain.over == "chain"
    # 3 + 2 + 2 tokens in 3 rounds, and 2 + 3 + 1.5 in 3.
    assert gain.tokens == pytest.approx(7 / 3 - 6.5 / 3)
    low, high = gain.interval or (0, 0)
    # Drawn twice, the prompts alone give 3 - 2.5 and 2 - 1.5.
    assert (low, high) == pytest.approx((gain.tokens, 0.5)) and low < high


def test_what_only_one_has_finished_counts_for_neither() -> None:
    failed = replace(CHAIN[1], finish_reason="error", error="no")
    alone = gain_over(TREE[:1], CHAIN[:1], QUICK)
    assert alone is not None and alone.tokens == pytest.approx(0.5) and alone.interval is None
    assert gain_over(TREE, [CHAIN[0], failed], QUICK) == alone
    assert gain_over(TREE, [failed], QUICK) is None
    assert gain_over(TREE, [], QUICK) is None


def test_a_summary_has_the_gains_of_all_others() -> None:
    plain = [record(name, "plain", (0.0,)) for name in "ab"]
    colder = replace(TREE[0], temperature=0.5)
    records = [*plain, *CHAIN, *TREE, colder]
    found = {
        (m.method, m.temperature): m.gain
        for m in summarize(records, planned=2, bootstrap=QUICK, compared_with="chain").methods
    }
    assert found["tree", 1.0] == gain_over(TREE, CHAIN, QUICK)
    assert [key for key, gain in found.items() if gain is None] == [("plain", 1.0), ("chain", 1.0), ("tree", 0.5)]
    assert all(method.gain is None for method in summarize(records, planned=2, bootstrap=QUICK).methods)
