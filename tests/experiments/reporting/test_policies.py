"""What policies lose against the best fixed length, on records with hand-computed figures."""

from collections.abc import Sequence

import pytest

from experiments.reporting.policies import EVERYTHING, loss_table, policy_losses
from experiments.reporting.table import Emphasis
from experiments.results.frame import Figures
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from specdec.drafting.costs import RoundCosts
from tests.experiments.results.outputs import output


def record(method: str, prompt: int, seconds: float, depth: int, rounds: int) -> Record:
    fields = {"category": "ab"[prompt % 2], "batch": prompt, "seconds": seconds}
    return output(str(prompt), method, tokens=12, accepted=(0,) * rounds, proposed_depth=(depth,) * rounds, **fields)


# By the clock, depth 1 is best for a and depth 2 for b. By the costs, 12 tokens take 12 s in 6 rounds of depth 2, and
# 15 s in 10 rounds of depth 1.
RECORDS = [
    record(method, prompt, seconds, depth, rounds)
    for prompt in range(4)
    for method, seconds, depth, rounds in (
        ("fixed_1", (3.0, 5.0)[prompt % 2], 1, 10), ("fixed_2", 4.0, 2, 6), ("policy", 4.0, 2, 9), ("nodes", 2.0, 2, 6)
    )
]  # fmt: skip


def losses(fixed: Sequence[str] = ("fixed_1", "fixed_2")) -> list[Figures]:
    by_depth, others = ["fixed_1", "fixed_2", "policy"], ["policy", "nodes"]
    costs = RoundCosts(rows=(1,), table=((1.0, 1.5, 2.0),))
    return policy_losses(
        RECORDS, fixed=fixed, by_depth=by_depth, others=others, costs=costs, rows=1, bootstrap=Bootstrap(resamples=100)
    )


def test_losses_by_the_clock_and_by_costs() -> None:
    found = {(each.category, each.policy): each for each in losses()}
    assert set(found) == {(category, policy) for category in ("a", "b", EVERYTHING) for policy in ("policy", "nodes")}
    a, b, whole = (found[category, "policy"] for category in ("a", "b", EVERYTHING))
    assert (a.best, b.best, whole.best) == ("fixed_1", "fixed_2", "fixed_1")
    assert (a.loss, b.loss) == (pytest.approx(1 - 3 / 4), pytest.approx(0.0))
    assert a.interval == pytest.approx((0.25, 0.25)), "all prompts are alike"
    assert a.modelled_best == "fixed_2" and a.modelled_loss == pytest.approx(1 - 12 / 18)
    assert found["a", "nodes"].loss == pytest.approx(1 - 3 / 2), "it is faster"
    assert found["a", "nodes"].modelled_loss is None, "its rounds do not cost what their depth says"
    assert a.mean_depth == 2


def test_the_table_names_the_worst_category() -> None:
    table = loss_table(losses(), 0.95)
    assert table is not None and len(table.rows) == 6
    worst = "policy loses at most 25.0% by the clock (a), and 33.3% by the costs"
    assert any(note.startswith(worst) for note in table.notes)
    assert table.rows[0][5].emphasis is Emphasis.MISSED and table.rows[0][5].text == "+25.0%"
    assert loss_table(losses(fixed=()), 0.95) is None
