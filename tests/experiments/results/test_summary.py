"""Figures and verdicts from hand-made records, and where they are shown: tables in all media, pictures, progress."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from experiments.reporting import progress, style, terminal
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table, errors_of, run_table
from experiments.reporting.table import Cell, Col, Emphasis, Table, three_digits, words
from experiments.reporting.verdicts import evidence, losses, print_verdicts
from experiments.results.frame import frame_of
from experiments.results.lossless import Verdict, divergences_of, judge
from experiments.results.origin import json_text
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over
from experiments.session.measurement import NotLosslessError, check_lossless
from tests.experiments.made_runs import output, run_of

QUICK = Bootstrap(resamples=200)


def record(prompt: str, method: str, batch: int, seconds: float | None, tokens: int, **more: Any) -> Record:
    """Of plain decoding, a round for each token; else two rounds, of which 2 of 3 and 0 of 3 tokens were accepted."""
    drafted = {"accepted": (2, 0), "proposed_depth": (3, 3), "proposed_nodes": (6, 6), "expected_accepted": (1.5, 0.5)}
    fields = {"accepted": (0,) * tokens} if method == "plain" else drafted
    fields |= {"batch": batch, "seconds": seconds, "stage_seconds": {"verify": 0.5}}
    return output(prompt, method, tokens=tokens, **fields | more)


# Plain: 10 tokens in 2 s and 20 in 4 s (5 per second); fast: 10 in 1 s and 20 in 1 s (15 per second).
PAIRS = [
    record("a", "plain", 0, 2.0, 10, category="x"),
    record("a", "fast", 0, 1.0, 10, category="x", equals_plain=True),
    record("b", "plain", 1, 4.0, 20, category="y"),
    record(
        "b", "fast", 1, 1.0, 20, category="y", equals_plain=False, divergence=3, margin=0.001, tie_bound=0.002,
        tokens_at_divergence=(7, 9), texts_at_divergence=(" [a]", " b"),
    ),
]  # fmt: skip


def test_figures_by_hand() -> None:
    run = run_of(PAIRS)
    plain, fast = run.rows
    assert (plain["tokens_per_second"], fast["tokens_per_second"]) == (5.0, 15.0)
    assert (plain["speedup"], fast["speedup"]) == (None, 3.0)
    assert (fast["speedup_low"], fast["speedup_high"]) == (2.0, 4.0), "the two prompts' own ratios"
    assert (plain["mean_acceptance_length"], fast["mean_acceptance_length"]) == (1, 2.0)
    assert fast["expected_mean_acceptance_length"] == 2.0
    assert (fast["proposed_depth_per_round"], fast["proposed_nodes_per_round"]) == (3, 6)
    assert (fast["tokens"], fast["rounds"]) == (30, 4)
    assert (fast["stage_seconds.verify"], fast["stage_seconds.other"]) == (1.0, 1.0)
    assert (fast["equal_to_plain"], fast["compared_with_plain"], fast["divergences"]) == (1, 2, 1)
    outputs = run.of(fast)
    assert [(d.prompt, d.index, d.margin) for d in divergences_of(outputs)] == [("b", 3, 0.001)]
    parts = {part["category"]: part["speedup"] for part in run.parts if part["method"] == "fast"}
    assert parts == {"x": 2.0, "y": 4.0}
    assert (fast["finish.length"], fast["distinct_4_gram_rate"]) == (2, 1)


def test_a_failure_counts_nowhere_but_as_a_failure() -> None:
    bad = replace(PAIRS[3], finish_reason="error", error="boom", seconds=None, equals_plain=None, divergence=None)
    run = run_of([*PAIRS[:3], bad])
    plain, fast = run.rows
    assert run.complete, "it is finished, though not well"
    assert (fast["finished"], fast["failed"], errors_of(run, fast)) == (1, 1, {"boom": 1})
    # Speed is compared on the prompt that both finished, and plain decoding keeps its own second one.
    assert (fast["speedup"], fast["speedup_low"], fast["tokens"]) == (2.0, None, 10)
    assert (fast["timed_prompts"], plain["timed_prompts"]) == (1, 2)
    assert not run_of(PAIRS[:2], planned=1, series=4).complete, "another temperature has not begun"


def test_a_gain_is_of_totals_over_the_prompts_that_both_have() -> None:
    def rounds(prompt: str, *expected: float) -> Record:
        columns = {"accepted": (0,) * len(expected), "proposed_depth": (3,) * len(expected)}
        return output(prompt, temperature=1.0, expected_accepted=expected, **columns)

    chain, tree = [rounds("a", 1.0, 2.0), rounds("b", 0.5)], frame_of([rounds("a", 2.0), rounds("b", 1.0, 1.0)])
    failed = replace(chain[1], finish_reason="error", error="no")
    found, alone = (gain_over(tree, frame_of(other), QUICK) for other in (chain, [chain[0], failed]))
    assert found is not None and alone is not None
    # 3 + 2 + 2 tokens in 3 rounds, and 2 + 3 + 1.5 in 3.
    assert found.difference == pytest.approx(7 / 3 - 6.5 / 3)
    # Drawn twice, the prompts alone give 3 - 2.5 and 2 - 1.5.
    assert found.interval == pytest.approx((found.difference, 0.5))
    assert alone.difference == pytest.approx(0.5), "what only one has finished counts for neither"
    assert alone.interval is None and gain_over(tree, frame_of([failed]), QUICK) is None


def raced(*methods: tuple[str, tuple[float, ...]], **more: Any) -> list[Record]:
    """Ten tokens in so many seconds, prompt by prompt."""
    every = [("plain", (4.0, 8.0, 2.0, 6.0)), *methods]
    return [
        record(f"p{batch}", name, batch, seconds, 10, **({} if name == "plain" else more))
        for name, times in every
        for batch, seconds in enumerate(times)
    ]


# On every prompt, the first is 5 % faster; prompts differ by much more than that, so their own intervals overlap.
CLEAR = (("first", (2.0, 2.0, 1.6, 4.0)), ("second", (2.1, 2.1, 1.68, 4.2)))


def fastest(records: list[Record]) -> list[str]:
    return [row["method"] for row in run_of(records).rows if row["best.speedup"]]


def test_a_winner_is_one_whose_paired_lead_leaves_out_nothing() -> None:
    found = run_of(raced(*CLEAR)).rows
    assert found[1]["speedup_low"] <= found[2]["speedup_high"]
    assert fastest(raced(*CLEAR)) == ["first"]
    # The mutant: of the same mean lead, but carried by one prompt of four.
    assert fastest(raced(CLEAR[0], ("second", (2.0, 2.0, 1.6, 4.5)))) == []
    assert fastest(raced(CLEAR[0])) == [], "a single competitor leads nobody"
    assert fastest([each for each in raced(*CLEAR) if each.prompt == "p0"]) == [], "one prompt says nothing"


def test_only_exact_methods_compete() -> None:
    parted = {"equals_plain": False, "divergence": 1, "margin": 4.0}
    kinds: dict[str, dict[str, Any]] = {
        "lossy": {"exactness": "lossy"},
        "of another law": {"exactness": "exact with respect to another distribution"},
        "parted": {**parted, "tie_bound": 0.1},
        "declared": {"exactness": "exact (declared)"},
        "tied": {**parted, "tie_bound": 5.0},
    }
    every: list[Record] = []
    for place, (name, more) in enumerate(kinds.items(), start=1):  # each faster than the next one
        times = tuple(place * seconds for seconds in (0.1, 0.1, 0.08, 0.2))
        every += [each for each in raced((name, times), **more) if each.method == name]
    rows = run_of(raced(*CLEAR) + every).rows
    assert [row["method"] for row in rows if row["competes"]] == ["first", "second", "declared", "tied"]
    assert [row["method"] for row in rows if row["best.speedup"]] == ["declared"]


def parted(prompt: str, margin: float | None, bound: float | None, **more: Any) -> Record:
    """A record whose output differs at the second token."""
    found = {"equals_plain": False, "divergence": 1, "margin": margin, "tie_bound": bound}
    return output(prompt, **found | {"tokens_at_divergence": (7, 9), "texts_at_divergence": (" [a]", " b")} | more)


def test_what_no_bound_explains_is_not_lossless() -> None:
    """The worst is the largest of those that nothing explains, even if a tie of a wide bound has a larger margin.

    A bound of zero is an invariant engine's: equal logits are decided by the token's id in every method.
    """
    equal = output("0", equals_plain=True)
    several = [equal, parted("1", 9.0, 10.0), parted("2", 4.0, 0.3), parted("4", 0.4, 0.3)]
    ended = parted("3", None, None, tokens_at_divergence=(None, 9), texts_at_divergence=(None, " b"))
    worst = (
        "NOT LOSSLESS: 2 of 4 outputs leave plain decoding's by more than the dtype explains; worst on 2 at "
        "output token 1: ' [a]' (token 7) instead of ' b' (token 9), margin 4 nats, bound 0.3"
    )
    ends = "the end of the output instead of ' b' (token 9), where no dtype explains a difference"
    for outputs, margin, said in (
        (several, 4.0, worst),
        ([equal, ended], None, ends),
        ([equal, parted("1", 0.0, 0.0)], 0.0, "margin 0 nats, bound 0"),
    ):
        found = judge(outputs)
        assert found is not None and (found["lossless"], found["largest_margin"]) == (Verdict.NOT_LOSSLESS, margin)
        assert evidence({**found, "compared_with_plain": len(outputs)}, outputs).endswith(said)


def test_it_is_said_in_tables_in_red_at_the_end_by_an_error_and_in_json() -> None:
    bug, tie = run_of([*PAIRS[:3], replace(PAIRS[3], margin=4.0)]), run_of(PAIRS)
    for table in (run_table(bug, "t"), comparison_table(bug, "t")):
        (cell,) = (cell for row in table.rows for cell in row if "NOT LOSSLESS" in cell.line)
        assert cell.line == "1 of 2, NOT LOSSLESS" and cell.emphasis is Emphasis.MISSED
        assert "**1 of 2, NOT LOSSLESS**" in table.markdown()
    assert "else ties" in run_table(tie, "t").markdown()
    console = Console(record=True, width=300, file=io.StringIO(), color_system="standard", force_terminal=True)
    print_verdicts(console, bug)
    text = console.export_text(styles=True)
    assert "\x1b[1;31mfast: NOT LOSSLESS: 1 of 2 outputs" in text, "bold and red"
    assert "' [a]' (token 7)" in text, "brackets of a token are no markup"
    check_lossless(tie)
    with pytest.raises(NotLosslessError, match=r"^fast: NOT LOSSLESS: 1 of 2 outputs leave plain decoding's"):
        check_lossless(bug)
    found = json_text({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": "NaN"})
    assert json.loads(found, parse_constant=pytest.fail) == {"a": [1.5, None, [None]], "b": {"c": None}, "d": "NaN"}


def test_a_method_that_loses_says_what_its_rounds_lack_and_what_pays() -> None:
    row = {"label": "look", "temperature": 0.0, "competes": True, "mean_acceptance_length": 1.2, "speedup": 0.5}
    slow, fast = row | {"speedup_low": 0.4, "speedup_high": 0.6}, row | {"label": "fast", "speedup": 1.5}
    fast |= {"speedup_low": 1.2, "speedup_high": 1.8}
    said = "look loses: 0.50x plain decoding, with 1.20 tokens in rounds of 2.40 plain steps: it pays above 2.40 tokens"
    assert losses([slow, fast | {"label": "less", "speedup": 1.3}, fast]) == [f"{said}; fast pays here (1.50x)"]
    (alone,) = losses([slow, slow | {"speedup_high": 1.1}, fast | {"speedup_low": 0.9}, fast | {"competes": False}])
    assert alone == f"{said}; nothing measured here pays: decode without drafts"


def test_letters_are_large_figures_narrow_and_a_lossy_rule_says_so(tmp_path: Path, monkeypatch) -> None:
    """Two categories, two temperatures, and a rule that is lossy."""
    made = [replace(r, exactness=r.exactness and "lossy") for r in PAIRS]
    lossy = run_of([replace(r, temperature=t, category=c) for r in made for t in (0.0, 1.0) for c in "xy"], series=4)
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    for name, plot in RUN_PLOTS.items():
        before = len(figures)
        plot(lossy, tmp_path / name, "conditions")
        for figure in figures[before:]:
            assert figure.get_figwidth() == style.PAGE
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert min(float(text.get_fontsize()) for text in texts) >= style.SMALLEST
            assert any("lossy" in text.get_text() for text in texts), name
    assert len(figures) >= 2 * len(RUN_PLOTS), "PNG and SVG"


def example() -> Table:
    columns = (Col("T"), words("method and settings"), Col("mean\nlength"), Col("none"))
    table = Table(columns, "org/[bold]Model_1", ["intervals at 95%", "rule: <exact>"])
    table.add("0", Cell("model", ("shape=4", "a_b=[1]"), joint=", "), Cell("2.11", ("[2.00, 2.33]",)), "-")
    best = Cell("1.82x", ("[1.67, 2.00]",), emphasis=Emphasis.BEST)
    table.add("0", Cell("[typical]", emphasis=Emphasis.LOSSY), best, "-", end_section=True)
    table.add("1", r"""a\b{c}$d&e#f%g_h^i~j<k>l|m"n`o""", Cell("-", emphasis=Emphasis.MISSED), "-", end_section=True)
    return table


def test_terminal_and_markdown() -> None:
    for stacked in (False, True):
        console = Console(width=90, record=True, file=io.StringIO())
        console.print(terminal.render(example(), stacked=stacked))
        text = console.export_text()
        said = ("[bold]Model_1", "intervals at 95%; rule: <exact>", "a_b=[1]", "[2.00, 2.33]", "k>l|m", "length")
        assert [each for each in said if each not in text] == []
    head, rule, first, second, third = example().markdown().splitlines()
    assert (head, rule) == ("| T | method and settings | mean length | none |", "|---:|---|---:|---:|")
    assert first == "| 0 | model, shape=4, a_b=[1] | 2.11 [2.00, 2.33] | - |"
    assert second == "| 0 | *[typical]* | **1.82x [1.67, 2.00]** | - |" and r"k>l\|m" in third


def test_a_small_figure_does_not_read_as_nothing() -> None:
    texts = {0.0: "0.0", 0.24: "0.24", 0.0042: "0.0042", 9.83: "9.8", 159.2: "159.2"}
    assert {value: Col("tokens/s", "rate", ".1f").cell({"rate": value}).text for value in texts} == texts
    digits = {0.0: "0.00", 0.0042: "0.0042", 15.92: "15.9", 1592.0: "1,592"}
    assert {value: three_digits(value) for value in digits} == digits


def test_latex_escapes_what_it_would_read() -> None:
    tex = example().latex("tab:x")
    rows = [line.strip() for line in tex.splitlines() if "&" in line]
    assert rows[1] == r"0 & model, shape=4, a\_b=[1] & 2.11 [2.00, 2.33] & - \\"
    assert r"\bfseries" in rows[2] and r"\itshape" in rows[2] and "1.82x [1.67, 2.00]" in rows[2]
    assert r"a\textbackslash{}b\{c\}\$d\&e\#f\%g\_h" in rows[3]
    assert r"\caption{org/[bold]Model\_1. intervals at 95\%. rule: \textless{}exact\textgreater{}.}" in tex
    assert r"\toprule" in tex and "booktabs" in tex and r"\label{tab:x}" in tex


def test_the_time_left_is_by_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Neither what was warmed up before, nor what an earlier attempt has done."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress(10, passed=2) as shown:
        for done, seconds in ((0, 300.0), (2, 0.0), (3, 40.0)):
            now[0] += seconds
            shown.update(done)
    *_, said = capsys.readouterr().err.splitlines()
    assert said == f"3 of 10 prompts, 40 s elapsed, about {progress.duration(40 * 7)} left"
