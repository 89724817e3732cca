"""A calibration of step costs from its configuration, and what is printed and written of it."""

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from experiments.config.sections import build, plain
from experiments.measuring.calibrating import Plan
from experiments.measuring.calibrating import calibrate as measured
from experiments.measuring.forwards import Grid
from experiments.reporting.calibration import constants_table, errors_table, remarks
from experiments.reporting.formats import publish
from experiments.session.engines import settle
from experiments.session.methods import check_components
from specdec.interfaces import Drafter
from specdec.physics.calibrated import CalibratedRounds
from specdec.target.target import Target

_ENGINE = ("attention", "optimize", "kv_cache", "invariant")
_TEXT = "def area(self):\n    return self.width * self.height\n\n\nclass Square(Shape):\n    def __init__(self):\n"


def calibrate(config: DictConfig) -> CalibratedRounds:
    """Calibrate by a checked configuration, print what was found, and write it."""
    settle(config)
    drafts = config.drafter.get("_target_") is not None
    check_components(config, {"": "drafter"} if drafts else {}, ("target", "verifier", "sampling"))
    target: Target = build(config, "target")
    drafter: Drafter | None = build(config, "drafter") if drafts else None
    plan = plan_of(config, target, drafter)
    options = {name: value for name, value in plain(config, "engine").items() if name in _ENGINE}
    prompt = [1] if target.tokenizer is None else target.tokenizer.encode(_TEXT)
    with Console(stderr=True).status("calibrating") as status:
        found = measured(
            target,
            drafter,
            build(config, "verifier") if drafts else None,
            prompt,
            plan,
            sampling=build(config, "sampling"),
            progress=status.update,
            **options,
        )
    out = Path(config.out)
    path = out / "costs.json"
    out.mkdir(parents=True, exist_ok=True)
    found.save(path)
    publish(
        out,
        "calibration",
        tables=[constants_table(found), errors_table(found)],
        said=remarks(found),
        drawn=lambda: [path],
    )
    return found


def plan_of(config: DictConfig, target: Target, drafter: Drafter | None) -> Plan:
    """Returns the plan: the grid as far as the model has room for it, the drafter's largest tree included."""
    grid, held_out = plain(config, "grid"), plain(config, "held_out")
    drafted = {*grid["drafted"]} | ({drafter.max_nodes} if drafter is not None else set())
    room = target.max_length - max(*drafted, *held_out["drafted"]) - 1
    made = []
    for name, given in (("grid", {**grid, "drafted": drafted}), ("held_out", held_out)):
        context = [length for length in given["context"] if length <= room]
        if not context:
            raise ValueError(
                f"{name}.context={given['context']}: {target.name} has {target.max_length} positions, which leaves "
                f"{room} behind drafts: give contexts of at most that"
            )
        made.append(Grid(**{key: tuple(sorted(set(values))) for key, values in {**given, "context": context}.items()}))
    return Plan(
        grid=made[0],
        held_out=made[1],
        seconds=50 if config.seconds is None else config.seconds,
        rounds=config.rounds,
        seed=config.seed,
    )
