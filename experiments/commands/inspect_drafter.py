"""A drafter inspected, and what is printed about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import drafters
from drafters.heads.files import Checkpoint
from experiments.config.groups import sections
from experiments.config.pairs import check_files
from experiments.config.sections import build, plain
from experiments.exporting.kinds import KINDS
from experiments.exporting.kinds import kind_of as kind_of_files
from experiments.inspecting.acceptance import prompts_of
from experiments.inspecting.facts import facts_of, trained_on
from experiments.inspecting.kinds import USUAL, check_one_model
from experiments.inspecting.search import Inspection, inspect
from experiments.reporting import terminal
from experiments.reporting.checks import facts_table, predictions_table, tried_table, verdict
from experiments.reporting.progress import steps_shown
from experiments.session.engines import settle
from experiments.session.methods import check_components
from specdec.interfaces import Drafter
from specdec.target.target import Target

_WHERE = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
_OVERRIDES = ("hidden_layers", "mask_token_id")
"""Settings that stand in place of what a checkpoint says."""
_DEEPEST = 7
"""The longest chain that is drafted, unless another length is wanted."""


def inspect_drafter(config: DictConfig) -> Inspection:
    """Inspect the drafter of a checked configuration, and print facts, acceptance, and the verdict."""
    settle(config)
    if config.drafter.get("_target_") is None:
        config.drafter = _by_its_files(config.drafter.get("name"))
    check_components(config, {"": "drafter"}, ("target",))
    options = plain(config, "drafter")
    check_files(config)
    first: Drafter = build(config, "drafter")
    check_one_model(first.describe())
    chain = {"shape": config.depths or min(first.max_depth, _DEEPEST), "sampling": "iid"}
    given = [name for name in _OVERRIDES if options.get(name) is not None]
    target: Target = build(config, "target")

    def make(settings: Mapping[str, Any]) -> Drafter:
        changed = OmegaConf.to_container(config.drafter)
        assert isinstance(changed, dict)
        return build(OmegaConf.create({**config, "drafter": {**changed, **chain, **settings}}), "drafter")

    checkpoint = _checkpoint(options, target)
    title = f"{type(first).__name__} {options.get('name') or ''}".strip()
    heading = f"{title}, inspected with {target.name}"
    console = terminal.console()
    with steps_shown("the target writes") as say:
        prompts = prompts_of(target, config.prompts, config.seed)
        found = inspect(
            make,
            target,
            prompts,
            tokens=config.tokens or 48,
            seed=config.seed,
            given=given,
            progress=lambda text: say(f"trying: {text}"),
        )
    trained = None if checkpoint is None else trained_on(checkpoint)
    usual = USUAL.get(found.drafter.kind)
    terminal.show(
        console,
        facts_table(heading, facts_of(found.drafter, target, checkpoint, found.loaded.frequencies)),
        predictions_table(found, usual),
        tried_table(found) if found.tried or found.refused else None,
    )
    terminal.say(console, *verdict(title, target.name, found, usual, trained))
    return found


def _by_its_files(name: str | None) -> DictConfig:
    """The section of a drafter whose files say what kind it is."""
    if name is None:
        raise ValueError(
            "drafter=none drafts nothing, so there is nothing to inspect: give another drafter, or a folder"
        )
    kind = KINDS[kind_of_files(name)]
    makers = [getattr(drafters, each) for each in dir(drafters)]
    maker = next(each for each in makers if kind in getattr(each, "public", ()))
    options = sections("drafter", None).values()
    section = next(each for each in options if each.get("_target_", "").endswith(f".{maker.__name__}.from_pretrained"))
    section.name = name
    return section


def _checkpoint(options: dict[str, Any], target: Target) -> Checkpoint | None:
    """Returns the files that a drafter was loaded from; None if there are none with a ``config.json``."""
    name = options.get("name") or target.model.config.name_or_path
    if not name or (Path(name).exists() and not Path(name).is_dir()):
        return None
    try:
        return Checkpoint(name, **{key: options[key] for key in _WHERE if options.get(key) is not None})
    except ValueError:
        return None
