"""The demonstration: two methods side by side as live text, then all of them measured."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

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
from experiments.results.runs import Run
from experiments.session.assembly import measure_methods, title
from experiments.session.measurement import Report
from specdec.engine.engine import Engine
from specdec.target.spelling import token_bytes

_PENALTY = 1.2
"""The race's repetition penalty: without one a small model repeats itself, and nobody wants to read that."""


def demo(config: DictConfig) -> Run:
    """Show and measure the configuration's methods at its temperatures."""
    methods = {str(name): f"methods.{name}" for name in config.methods}
    _give_tree(config, methods)

    def opening(contenders: Sequence[Contender]) -> None:
        chosen, spare = choose(build(config, "dataset"), spare=1)
        engine = contenders[0].engine
        assert engine.target.tokenizer is not None, "assemble refuses a target without one"
        sampling = replace(build(config, "sampling"), n=1, temperature=float(config.temperatures[0]))
        prompts = [*spare, *chosen]  # if possible, one that is not measured
        (job, *_), _ = prepare(prompts, sampling, engine.target.tokenizer, max_length=engine.max_length)
        _race(contenders, str(config.race), job, config.race_tokens)

    report = Report(
        tables=lambda made, title: [comparison_table(made, title)],
        plots=RUN_PLOTS,
        opening=opening if config.race is not None else None,
    )
    return measure_methods(config, methods=methods, report=report, temperatures=config.temperatures)


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
        each.engine.forget()
    target = plainly.engine.target
    assert target.tokenizer is not None, "assemble refuses a target without one"
    texts = token_bytes({token.token for lane in lanes for token in lane.tokens}, target.tokenizer)
    heading = title(target, [job.sampling], f"one prompt, repetition penalty {_PENALTY}")
    show_race(terminal.console(), lanes, texts, heading)
