"""A rule tried on tables, and what is printed about it."""

from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from experiments.config.sections import build
from experiments.measuring.exactness import LAWS, SHARED_LEVEL, Case, cases
from experiments.reporting import terminal
from experiments.reporting.checks import exactness_table
from experiments.results.checked import remember, ships, stated_exactness
from specdec.engine.parts import check_component
from specdec.interfaces import Verifier
from specdec.types import Exactness, Noise

NARROW = 80
"""Characters per line in a file or pipe: the tables are that narrow."""


def check_verifier(config: DictConfig) -> list[Case]:
    """Try the verifier of a checked configuration on every case that it takes; a wrong promise is an error."""
    rule: Verifier = build(config, "verifier")
    check_component("verifier", rule)
    name, settings = type(rule).__name__, (config.vocab, config.tables, config.seed, list(config.temperatures))
    with Console(stderr=True).status("drafts") as status:
        done = list(cases(rule, *settings, streams=config.streams, advance=status.update))
    if not done:
        tried = ", ".join(law.name.lower() for law in LAWS)
        raise ValueError(f"{name} takes none of the drafts that are tried: chains and trees, {tried}")
    console = terminal.console(NARROW)
    terminal.show(console, exactness_table(rule, done), frame=terminal.Frame.TIGHT)
    try:
        said, found = (_shared_verdict if rule.noise is Noise.SHARED else _verdict)(rule, done, config)
    except ValueError:
        if rule.exactness is Exactness.EXACT and not ships(rule):
            remember(rule, passed=False, **_settings(config), cases=len(done))
        raise
    console.print(said)
    if rule.exactness is Exactness.EXACT:
        _remember(rule, config, console, cases=len(done), **found)
    return done


def _verdict(rule: Verifier, done: Sequence[Case], config: DictConfig) -> tuple[str, dict[str, float]]:
    """The verdict in words, and the figure behind it."""
    name, worst = type(rule).__name__, max(done, key=lambda case: case.tv)
    exact = worst.tv < config.threshold
    where = f"{worst.shape}, {worst.law.name}, {worst.rows} tables, temperature {worst.temperature:g}"
    if rule.exactness is not Exactness.LOSSY and not exact:
        raise ValueError(
            f"{name} says that it is {rule.exactness.value} and is not: total variation {worst.tv:.3g} ({where})"
        )
    found = "exact" if exact else f"not exact: total variation up to {worst.tv:.3g} ({where})"
    if exact and rule.exactness is Exactness.EXACT_WRT:
        distance = max(case.target_tv for case in done)
        found = (
            f"exact with respect to the distribution that it states, which is up to {distance:.3g} from the target's"
        )
    said = f"{name} is {found}, over {len(done)} cases. It says of itself: {rule.exactness.value}."
    return said, {"largest_total_variation": worst.tv}


def _shared_verdict(rule: Verifier, done: Sequence[Case], config: DictConfig) -> tuple[str, dict[str, float]]:
    """The same of a rule with shared noise."""
    name = type(rule).__name__
    differing, p_value = sum(case.differing for case in done), min(case.p_value for case in done)
    if differing or p_value < SHARED_LEVEL:
        raise ValueError(
            f"{name} says that its noise is shared, and {differing} outputs are not those of plain decoding, whose "
            f"law fits the target's with a p-value of {p_value:.2g}"
        )
    said = (
        f"{name} is exact by its own check: over {len(done)} cases of {config.streams} seeds each, no output differs "
        f"from plain decoding's, which follows the target (smallest p-value {p_value:.2g}). "
        f"It says of itself: {rule.exactness.value}, noise {rule.noise.value}."
    )
    return said, {"smallest_p_value": p_value}


def _remember(rule: Verifier, config: DictConfig, console: Console, **found: object) -> None:
    """Remember that a rule which does not ship with the package has passed, if the check was not a weak one."""
    if ships(rule):
        return
    name = type(rule).__name__
    weak = [f"{key}={config[key]:g}" for key, enough in STRENGTH.items() if not enough(config[key])]
    if weak:
        say = f"A check with {', '.join(weak)} is a weak one and is not remembered"
        terminal.say(console, f"{say}: results call {name} {stated_exactness(rule)}.")
        return
    file = remember(rule, passed=True, **_settings(config), **found)
    if file is None:
        terminal.say(console, f"The source of {name} cannot be read, so it is not remembered: put it into a file.")
        return
    terminal.say(console, f"Remembered in {terminal.short(file)}: results call {name} exact until its code changes.")


def _settings(config: DictConfig) -> dict[str, Any]:
    """How a rule was checked, for the record."""
    how = {key: config[key] for key in ("vocab", "tables", "seed", "threshold", "streams")}
    return {"temperatures": list(config.temperatures), **how}


STRENGTH: dict[str, Callable[[float], bool]] = {
    "vocab": lambda value: value >= 3,
    "threshold": lambda value: value <= 1e-9,
    "streams": lambda value: value >= 1000,
}
"""What a check needs so that a rule which passes it is called exact in results."""
