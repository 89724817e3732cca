"""From the records of a run to its rows of the frame: the only place where they are computed."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.results import metrics, timing
from experiments.results.frame import Frame, Outputs, frame_of, rounds_of
from experiments.results.limits import Terms
from experiments.results.lossless import EXACT, Verdict, judge, promises_exact
from experiments.results.records import PLAIN
from experiments.results.requests import request_figures
from experiments.results.rows import ALL, FIGURES, Row, ends, typed
from experiments.results.statistics import Bootstrap, mean_of_all, ratio_of_sums

SCHEMA = 5
"""Of ``summary.json``: changes with the names or the meaning of columns."""
RANKED = ("mean_acceptance_length", "speedup")
"""Figures of which a run has a best exact method, at every temperature (``best.speedup``)."""


def summarize(
    outputs: Outputs,
    *,
    planned: int,
    series: int = 2,
    baseline: str = PLAIN,
    bootstrap: Bootstrap | None = None,
    terms: Terms | None = None,
    compared_with: str | None = None,
    peaks: Mapping[str, float] | None = None,
) -> Frame:
    """Return a run's rows (``rows.FIGURES``) from its records alone, in the order of their first records.

    Each method has a row for all prompts at each temperature and, if there are several categories, one for each.

    Args:
        planned: Records that every method was to have at every temperature; plain decoding may have more.
        series: Methods times temperatures: each method at one temperature is a series of records.
        baseline: The method that speedups are over.
        compared_with: The method that gains are over; None for no gains.
        peaks: What the device does at best (``timing.utilization_of``).
    """
    bootstrap, terms, frame = bootstrap or Bootstrap(), terms or Terms(), frame_of(outputs)
    by_series = _series_of(frame)
    rows: list[Row] = []
    wholes: dict[tuple[float, str], Row] = {}
    for (temperature, name), own in by_series.items():
        plain = by_series.get((temperature, baseline), frame[:0]) if name != baseline else None
        other = by_series.get((temperature, compared_with or "")) if name not in (baseline, compared_with) else None
        whole, *parts = _rows(own, plain, bootstrap)
        whole |= request_figures(own, terms, bootstrap) | timing.utilization_of(own, peaks)
        gain = None if other is None else timing.gain_over(own, other, bootstrap)
        if gain is not None:
            whole |= {"gain_over": compared_with, "gain": gain.difference, **ends("gain", gain.interval)}
        wholes[temperature, name] = whole
        rows += [whole, *parts]
    for figure in RANKED:
        for temperature in {temperature for temperature, _ in wholes}:
            rivals = {name: row for (at, name), row in wholes.items() if at == temperature and row["competes"]}
            plain = by_series.get((temperature, baseline))
            entrants = [(row, by_series[temperature, name], plain) for name, row in rivals.items()]
            best = timing.winner(figure, entrants, bootstrap)
            for number, row in enumerate(rivals.values()):
                row[f"best.{figure}"] = number == best
    done = all(row["finished"] + row["failed"] >= planned for row in wholes.values())
    shared = {"complete": len(wholes) == series and done, "planned": planned}
    shared |= {"confidence": bootstrap.confidence, **timing.noise_of(frame, baseline)}
    return typed([row | shared for row in rows], FIGURES)


def _series_of(outputs: Frame) -> dict[tuple[float, str], Frame]:
    """The outputs of every method at every temperature, in the order of their first records."""
    return dict(iter(outputs.groupby(["temperature", "method"], sort=False)))


def running_figures(outputs: Outputs, baseline: str = PLAIN) -> dict[tuple[str, float], dict[str, float]]:
    """The main figures of a run that has not ended, by method and temperature, as far as they can be computed yet."""
    by_series, running = _series_of(frame_of(outputs)), {}
    for (temperature, method), own in by_series.items():
        plain = None if method == baseline else by_series.get((temperature, baseline), own[:0])
        rounds, timed = rounds_of(own), timing.timed_calls(own, plain)
        figures = {
            "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
            "draft_acceptance_rate": metrics.draft_acceptance_rate(rounds),
            "tokens_per_second": timing.tokens_per_second(timed),
            "speedup": timing.speedup(timed),
        }
        running[method, temperature] = {name: value for name, value in figures.items() if value is not None}
    return running


def _rows(own: Frame, plain: Frame | None, bootstrap: Bootstrap) -> list[Row]:
    """Return the row of one method at one temperature, and those of its categories if there are several.

    All but ``failed`` is of what did not fail, and speed of batches without a failure here or in plain decoding.
    """
    good, rounds, name, exactness = own[~own.failed], rounds_of(own), own.method.iloc[0], own.exactness.iloc[0]
    timed, verdict = timing.timed_calls(own, plain), judge(own)
    rates = [rate for rate in map(metrics.distinct_n_gram_rate, good.token_ids) if rate is not None]
    compared = good[good.equals_plain.notna()]
    distance, ones = mean_of_all(rounds.distance_tv), np.ones(len(rounds))
    not_lossless = verdict is not None and verdict["lossless"] == Verdict.NOT_LOSSLESS
    declared = f"{name}, {exactness}" if promises_exact(exactness) else f"{name} ({exactness})"
    shared = {
        "method": name,
        "label": name if exactness in (None, EXACT) else declared,
        "exactness": exactness,
        "temperature": float(own.temperature.iloc[0]),
        "competes": promises_exact(exactness) and not not_lossless,
        "not_lossless": not_lossless,
    }
    columns = [rounds.distance_tv, ones]
    bounds = None if distance is None else bootstrap.over_prompts(ratio_of_sums, rounds.prompt, columns)
    whole = {
        **shared,
        "category": ALL,
        "failed": len(own) - len(good),
        **_figures(good, rounds, timed, bootstrap),
        "expected_mean_acceptance_length": metrics.expected_mean_acceptance_length(rounds),
        "distance_tv": distance,
        **ends("distance_tv", bounds),
        "distance_kl": mean_of_all(rounds.distance_kl),
        "draft_acceptance_rate": metrics.draft_acceptance_rate(rounds),
        "proposed_depth_per_round": rounds.proposed_depth.mean() or None,
        "proposed_nodes_per_round": rounds.proposed_nodes.mean() or None,
        "distinct_4_gram_rate": sum(rates) / len(rates) if rates else None,
        "equal_to_plain": int(compared.equals_plain.sum()) if len(compared) else None,
        "compared_with_plain": len(compared) or None,
        # How many divergences there are is known of lossy rules, too, which get no verdict.
        "divergences": int(good.divergence.notna().sum()) if len(compared) else None,
        **(verdict or {}),
        **{f"stage_seconds.{stage}": value for stage, value in timing.stage_seconds(timed).items()},
        **{f"finish.{reason}": count for reason, count in Counter(own.finish_reason).items()},
    }
    rows, categories = [whole], sorted(set(good.category))
    for category in categories if len(categories) > 1 else ():
        alone = timed[timed.categories == frozenset([category])]  # a batch of several categories belongs to none
        chosen = (good[good.category == category], rounds[rounds.category == category], alone)
        rows.append({**shared, "category": category, "failed": 0, **_figures(*chosen, bootstrap)})
    return rows


def _figures(good: Frame, rounds: Frame, timed: Frame, bootstrap: Bootstrap) -> dict[str, Any]:
    """The figures that all prompts, and those of a category, have."""
    bounds = bootstrap.over_prompts(ratio_of_sums, rounds.prompt, [1 + rounds.accepted, np.ones(len(rounds))])
    return {
        "finished": len(good),
        "tokens": int(good.tokens.sum()),
        "rounds": len(rounds),
        "mean_acceptance_length": metrics.mean_acceptance_length(rounds),
        **ends("mean_acceptance_length", bounds),
        **metrics.acceptance_by_position(rounds),
        "timed_prompts": int(timed.requests.sum()),
        "seconds": float(timed.seconds.sum()),
        "tokens_per_second": timing.tokens_per_second(timed),
        "speedup": timing.speedup(timed),
        **ends("speedup", timing.speedup_interval(timed, bootstrap)),
    }
