"""The demonstration: two methods side by side as live text, then all of them measured."""

import inspect
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.config.sections import build, component_of, plain
from experiments.measuring.jobs import Job, prepare
from experiments.measuring.measure import Contender
from experiments.measuring.race import run_lane
from experiments.reporting import terminal
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table
from experiments.reporting.tokens import show_race
from experiments.results.metrics import distinct_n_gram_rate
from experiments.results.origin import MANIFEST
from experiments.results.summary import Summary
from experiments.results.texts import token_bytes
from experiments.session.assembly import measure_methods, title
from experiments.session.engines import settle
from experiments.session.measurement import Report
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target

TRIED = 24
"""Tokens that are decoded to estimate a measurement's time, again and again."""
WARM, COUNTED = 2, 3
"""How often they are decoded to warm up, and how often on the clock."""
_PER_METHOD = 0.8
"""The time of a drafting method over plain decoding's, in the mean over temperatures; a guess on the safe side."""

_TRIED, _TRIED_TOKENS = 4, 96
"""Prompts among which the race's is chosen, and the tokens that are decoded of each for that."""
_PENALTY = 1.1
"""The race's repetition penalty: without one a small model repeats itself, and nobody wants to read that."""


def demo(config: DictConfig) -> Summary:
    """Show and measure the configuration's methods at its temperatures."""
    methods = {str(name): f"methods.{name}" for name in config.methods}
    _give_tree(config, methods)
    settle(config)  # threads count in the estimate, too
    begun = Path(config.out) / MANIFEST
    if config.resume and begun.is_file():  # an earlier decision stands
        config.target.inflate = json.loads(begun.read_text(encoding="utf-8"))["config"]["target"]["inflate"]
    else:
        changed = fit_to_machine(config)
        if changed is not None:
            terminal.say(terminal.console(), changed)

    def opening(contenders: Sequence[Contender], jobs: Sequence[Job]) -> None:
        if config.race is not None:
            _race(contenders, str(config.race), jobs, config.race_tokens)

    report = Report(tables=lambda summary, title: [comparison_table(summary, title)], plots=RUN_PLOTS, opening=opening)
    return measure_methods(config, methods=methods, report=report, temperatures=config.temperatures)


def fit_to_machine(config: DictConfig) -> str | None:
    """Take the model at its own size where the larger cost is too much for this machine.

    Args:
        config: With the sections of ``conf/demo.yaml``; ``target.inflate`` is set to null where it is too much.

    Returns:
        A sentence on what was changed and why; None if nothing was.
    """
    limit, size = config.time_limit, config.target.inflate
    if limit is None or size is None:
        return None
    needed = seconds_needed(config)
    if needed <= limit:
        return None
    config.target.inflate = None
    return (
        f"At the cost of a {size} model this would take about {needed:.0f} s here, more than time_limit={limit:g}: "
        f"{config.target.name} runs at its own size instead, where a forward is so short that drafting hardly pays"
    )


def seconds_needed(config: DictConfig) -> float:
    """The seconds that a measurement would take: the median of a few times of plain decoding that is warm."""
    target: Target = build(config, "target")
    engine = Engine(target, max_length=int(config.engine.max_length or 512))
    assert target.tokenizer is not None, "the demonstration's targets have one"
    prompts = build(config, "dataset").load()[:1]
    sampling = SamplingParams(max_new_tokens=TRIED, ignore_eos=True)
    jobs, _ = prepare(prompts, sampling, target.tokenizer, max_length=engine.max_length)
    times = []
    for _ in range(WARM + COUNTED):
        begin = time.perf_counter()
        (done,) = engine.generate([jobs[0].prompt_ids], sampling)  # its tokens are on the host: the device is done
        times.append((time.perf_counter() - begin) / len(done.token_ids))
    rounds = int(config.dataset.count) + int(config.warmup_prompts)
    tokens = rounds * int(config.sampling.max_new_tokens) * len(config.temperatures)
    return statistics.median(times[WARM:]) * tokens * (1 + _PER_METHOD * len(config.methods))


def _give_tree(config: DictConfig, methods: dict[str, str]) -> None:
    """Give every method that drafts trees the settings of ``drafter``, which ``tree=…`` makes.

    Raises:
        ValueError: A setting is none that such a method has.
    """
    given = plain(config, "drafter")
    for section in methods.values() if given else ():
        component, _ = component_of(config, section)
        if component is not None and "shape" in inspect.signature(component).parameters:
            with open_dict(config):
                OmegaConf.update(config, section, given, merge=True, force_add=True)


def _least_repetitive(engine: Engine, jobs: Sequence[Job]) -> Job:
    """The job whose plain output repeats itself least, of the first few: small models loop, which flatters drafters."""
    tried = [job for job in jobs if job.sampling == jobs[0].sampling][:_TRIED]
    room = engine.max_length - max(len(job.prompt_ids) for job in tried)
    sampling = replace(jobs[0].sampling, max_new_tokens=min(_TRIED_TOKENS, room), n=1, repetition_penalty=_PENALTY)
    outputs = engine.generate([list(job.prompt_ids) for job in tried], sampling, speculate=False)
    rates = [distinct_n_gram_rate(output.token_ids) or 0.0 for output in outputs]
    return tried[rates.index(max(rates))]


def _race(contenders: Sequence[Contender], method: str, jobs: Sequence[Job], tokens: int) -> None:
    """Show plain decoding and a method on one prompt, for as many tokens as were asked for and as there is room."""
    first = contenders[0].engine
    assert isinstance(first, Engine), "plain decoding runs on our engine"
    job = _least_repetitive(first, jobs)
    room = contenders[0].engine.max_length - len(job.prompt_ids)
    sampling = replace(job.sampling, max_new_tokens=min(tokens, room), repetition_penalty=_PENALTY)
    lanes = []
    for contender in contenders:
        if contender is contenders[0] or contender.method == method:
            engine = contender.engine
            assert isinstance(engine, Engine), "the methods of the demo are ours"
            lanes.append(run_lane(contender.method, engine, job.prompt_ids, sampling, speculate=contender.speculate))
    target = first.target
    assert target.tokenizer is not None, "assemble refuses a target without one"
    texts = token_bytes({token.token for lane in lanes for token in lane.tokens}, target.tokenizer)
    amount = f"one prompt, repetition penalty {_PENALTY}"
    heading = title(target, [job.sampling], amount, kv_cache=first.runner.kv_cache)
    show_race(terminal.console(), lanes, texts, heading)
