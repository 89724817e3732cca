"""The demonstration: two methods side by side as live text, then all of them measured."""

import inspect
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.config.sections import build, component_of, plain
from experiments.datasets.prompt import choose
from experiments.measuring.jobs import Job, prepare
from experiments.measuring.measure import Contender
from experiments.measuring.race import run_lane
from experiments.reporting import terminal
from experiments.reporting.race import show_race
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table
from experiments.results.origin import MANIFEST
from experiments.results.summary import Summary
from experiments.session.assembly import measure_methods, title
from experiments.session.measurement import Report
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.spelling import token_bytes

LEAST_PROMPTS, LEAST_TOKENS = 5, 48
"""The fewest prompts that are taken on a slow machine, and the fewest tokens of each.

Intervals of acceptance lengths (95 %), resampled from 24 prompts, hold the true one in 83 % of cases with five prompts,
79 % with four, 88 % with eight. Shorter outputs would show what a prompt costs more than what drafting brings.
"""
_WARM_TOKENS, _TIMED_TOKENS = 8, 24
"""Tokens that every method decodes to warm up, and then on the clock."""
_IMPORTS = time.time() - psutil.Process().create_time()
"""The seconds that this process took to come here."""
_CLOSING = 0.5
"""The time of tables and pictures over that of imports and loading: both are Python's more than the models'."""
_MARGIN = 1.1
"""The time that is planned for a measurement, over the estimate."""

_RACE_SECONDS, _RACE = 5.0, 3.0
"""The longest that plain decoding may take in the race; and the time of all of the race over that."""
_PENALTY = 1.2
"""The race's repetition penalty: without one a small model repeats itself, and nobody wants to read that."""


@dataclass(frozen=True)
class Pace:
    """Seconds of warm engines.

    Attributes:
        prompt: Of a prompt until its first round, in all methods at all temperatures together.
        token: Of a token of the output, in all of them together.
        plain: Of a token in plain decoding alone.
    """

    prompt: float
    token: float
    plain: float


def demo(config: DictConfig) -> Summary:
    """Show and measure the configuration's methods at its temperatures."""
    begin = time.perf_counter() - _IMPORTS
    methods = {str(name): f"methods.{name}" for name in config.methods}
    _give_tree(config, methods)
    begun = Path(config.out) / MANIFEST
    resumed = config.resume and begun.is_file()
    if resumed:  # an earlier decision stands
        earlier = json.loads(begun.read_text(encoding="utf-8"))["config"]
        config.dataset.count = earlier["dataset"]["count"]
        config.sampling.max_new_tokens = earlier["sampling"]["max_new_tokens"]

    def opening(contenders: Sequence[Contender]) -> None:
        loaded = time.perf_counter() - begin
        chosen, spare = choose(build(config, "dataset"), spare=1)
        engine, temperatures = contenders[0].engine, [float(each) for each in config.temperatures]
        assert engine.target.tokenizer is not None, "assemble refuses a target without one"
        sampling = replace(build(config, "sampling"), n=1, temperature=temperatures[0])
        tried = [*spare, *chosen]  # if possible, a prompt that is not measured
        (job, *_), _ = prepare(tried, sampling, engine.target.tokenizer, max_length=engine.max_length)
        pace = pace_of(contenders, job, temperatures)
        race = 0 if config.race is None else math.ceil(min(config.race_tokens, _RACE_SECONDS / pace.plain))
        if not resumed:
            besides = time.perf_counter() - begin + _CLOSING * loaded + _RACE * race * pace.plain
            terminal.say(terminal.console(), fit_to_machine(config, pace, len(chosen), besides))
        if race:
            _race(contenders, str(config.race), job, race)
        for each in contenders:
            if isinstance(each.engine, Engine):
                each.engine.forget()

    report = Report(
        tables=lambda summary, title: [comparison_table(summary, title)],
        plots=RUN_PLOTS,
        opening=opening,
        memory=False,
    )
    return measure_methods(config, methods=methods, report=report, temperatures=config.temperatures)


def fit_to_machine(config: DictConfig, pace: Pace, prompts: int, besides: float) -> str:
    """Take fewer prompts, and then fewer tokens, where this machine cannot do them all in time.

    Args:
        config: ``dataset.count`` and ``sampling.max_new_tokens`` are made smaller where that is needed.
        besides: The seconds that all takes besides the measurement.

    Returns:
        A sentence on what was measured, what is taken, and why.
    """

    def end(amount: tuple[int, int]) -> float:
        return besides + _MARGIN * amount[0] * (pace.prompt + amount[1] * pace.token)

    asked, limit = (prompts, int(config.sampling.max_new_tokens)), config.time_limit or math.inf
    fewest = prompts if config.dataset.get("per_category") else min(prompts, LEAST_PROMPTS)
    amounts = [(count, asked[1]) for count in range(prompts, fewest, -1)]
    amounts += [(fewest, tokens) for tokens in range(asked[1], LEAST_TOKENS, -8)]
    amounts.append((fewest, min(asked[1], LEAST_TOKENS)))
    taken = next((amount for amount in amounts if end(amount) <= limit), amounts[-1])
    said = f"Plain decoding takes {1000 * pace.plain:.3g} ms per token here: {asked[0]} prompts of {asked[1]} tokens"
    if taken == asked:
        return f"{said} by all methods will be done {end(asked):.0f} s after the start"
    config.dataset.count, config.sampling.max_new_tokens = taken
    least = ", the fewest that mean anything," if end(taken) > limit else ""
    return (
        f"{said} by all methods would be done {end(asked):.0f} s after the start (time_limit={limit:g}), so {taken[0]} "
        f"of {taken[1]} tokens{least} are taken, and done after {end(taken):.0f} s"
    )


def pace_of(contenders: Sequence[Contender], job: Job, temperatures: Sequence[float]) -> Pace:
    """Warm all methods up, so that the measurement need not, and time what they take from then on.

    Every method decodes the job twice at every temperature, and the second time counts.
    """
    most, found = job.sampling.max_new_tokens, []
    for each in contenders:
        if isinstance(each.engine, Engine):
            each.engine.warm_up()
        for temperature in temperatures:
            for tokens in (_WARM_TOKENS, _TIMED_TOKENS):
                own = replace(job.sampling, temperature=temperature, max_new_tokens=min(tokens, most), ignore_eos=True)
                timed = _timed(each, job, own)
            found.append(timed)
    return Pace(prompt=sum(first for first, _ in found), token=sum(token for _, token in found), plain=found[0][1])


def _timed(contender: Contender, job: Job, sampling: SamplingParams) -> tuple[float, float]:
    """The seconds that a prompt takes, and a token of its output."""
    begin = time.perf_counter()
    (done,) = contender.engine.generate([job.prompt_ids], [sampling], speculate=contender.speculate)
    end = time.perf_counter()
    start = begin if done.timestamps is None else done.timestamps.prefilled
    return start - begin, (end - start) / sampling.max_new_tokens


def _give_tree(config: DictConfig, methods: dict[str, str]) -> None:
    """Give every method that drafts trees the settings of ``drafter``, which ``tree=…`` makes."""
    given = plain(config, "drafter")
    for section in methods.values() if given else ():
        component, _ = component_of(config, section)
        if component is not None and "shape" in inspect.signature(component).parameters:
            with open_dict(config):
                OmegaConf.update(config, section, given, merge=True, force_add=True)


def _race(contenders: Sequence[Contender], method: str, job: Job, tokens: int) -> None:
    """Show plain decoding and a method on one prompt, for so many tokens as far as there is room."""
    plainly, other = contenders[0], next(each for each in contenders if each.method == method)
    room = plainly.engine.max_length - len(job.prompt_ids)
    sampling = replace(job.sampling, max_new_tokens=min(tokens, room), repetition_penalty=_PENALTY)
    lanes = []
    for each in (plainly, other):
        assert isinstance(each.engine, Engine), "the methods of the demo are ours"
        lanes.append(run_lane(each.method, each.engine, job.prompt_ids, sampling, speculate=each.speculate))
    target = plainly.engine.target
    assert target.tokenizer is not None, "assemble refuses a target without one"
    texts = token_bytes({token.token for lane in lanes for token in lane.tokens}, target.tokenizer)
    heading = title(target, [job.sampling], f"one prompt, repetition penalty {_PENALTY}")
    show_race(terminal.console(), lanes, texts, heading)
