"""A race: a method beside plain decoding on one prompt, as live text, before a run measures them."""

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.datasets.prompt import choose
from experiments.measuring.jobs import prepare, too_long
from experiments.measuring.measure import Contender
from experiments.measuring.race import run_lane
from experiments.reporting import terminal
from experiments.reporting.race import show_race
from experiments.session.assembly import title
from specdec.engine.engine import Engine
from specdec.target.spelling import token_bytes

_TOKENS = 96
_PENALTY = 1.2
"""The race's repetition penalty: without one a small model repeats itself, and nobody wants to read that."""


def race(config: DictConfig, contenders: Sequence[Contender]) -> None:
    """Show plain decoding and the method that ``config.race`` names on one prompt, as far as there is room."""
    plainly, other = contenders[0], next(each for each in contenders if each.method == config.race)
    chosen, spare = choose(build(config, "dataset"), spare=1)
    target, room = plainly.engine.target, plainly.engine.max_length
    assert target.tokenizer is not None, "assemble refuses a target without one"
    given = build(config, "sampling")
    temperature = float((config.temperatures or [given.temperature])[0])
    sampling = replace(given, n=1, temperature=temperature, repetition_penalty=_PENALTY)
    prompts = [*spare, *chosen]  # if possible, one that is not measured
    jobs = prepare(prompts, replace(sampling, max_new_tokens=1), target.tokenizer)
    job = next((job for job in jobs if too_long(job, room) is None), None)
    if job is None:
        raise ValueError(f"race={config.race}: no prompt fits into engine.max_length={room}: give a larger one")
    sampling = replace(sampling, max_new_tokens=min(_TOKENS, room - len(job.prompt_ids)))
    lanes = []
    for each in (plainly, other):
        if not isinstance(each.engine, Engine):
            raise ValueError(f"race={config.race} is another engine, give one of our methods")
        lanes.append(run_lane(each.method, each.engine, job.prompt_ids, sampling, speculate=each.speculate))
        each.engine.forget()
    texts = token_bytes({token.token for lane in lanes for token in lane.tokens}, target.tokenizer)
    show_race(terminal.console(), lanes, texts, title(target, [sampling], f"one prompt, repetition penalty {_PENALTY}"))
