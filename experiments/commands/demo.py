"""The demonstration: two methods side by side as live text, then all of them measured."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.commands.pace import fit_to_machine
from experiments.config.sections import component_of, plain
from experiments.config.settings import DEMO
from experiments.measuring.jobs import Job
from experiments.measuring.measure import Contender
from experiments.measuring.race import run_lane
from experiments.reporting import terminal
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table
from experiments.reporting.tokens import show_race
from experiments.results.origin import MANIFEST
from experiments.results.summary import Summary
from experiments.results.token_texts import token_bytes
from experiments.session.engines import settle
from experiments.session.measurement import Report, measure_methods, title
from specdec.engine.engine import Engine


def demonstrate(config: DictConfig, methods: dict[str, str]) -> Summary:
    """Show and measure methods, by their names and the configuration sections of their drafters."""
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
            _race(contenders, str(config.race), jobs[0], config.race_tokens)

    report = Report(tables=lambda summary, title: [comparison_table(summary, title)], plots=RUN_PLOTS, opening=opening)
    return measure_methods(config, known=DEMO, methods=methods, report=report, temperatures=config.temperatures)


def with_tree(config: DictConfig, methods: dict[str, str]) -> None:
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


def _race(contenders: Sequence[Contender], method: str, job: Job, tokens: int) -> None:
    """Show plain decoding and a method on one prompt, for as many tokens as were asked for and as there is room."""
    room = contenders[0].engine.max_length - len(job.prompt_ids)
    sampling = replace(job.sampling, max_new_tokens=min(tokens, room))
    lanes = []
    for contender in contenders:
        if contender is contenders[0] or contender.method == method:
            engine = contender.engine
            assert isinstance(engine, Engine), "the methods of the demo are ours"
            lanes.append(run_lane(contender.method, engine, job.prompt_ids, sampling, speculate=contender.speculate))
    plain = contenders[0].engine
    assert isinstance(plain, Engine), "plain decoding runs on our engine"
    target = plain.target
    assert target.tokenizer is not None, "assemble refuses a target without one"
    texts = token_bytes({token.token for lane in lanes for token in lane.tokens}, target.tokenizer)
    show_race(
        terminal.console(), lanes, texts, title(target, [job.sampling], "one prompt", kv_cache=plain.runner.kv_cache)
    )
