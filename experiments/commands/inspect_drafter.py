"""A drafter inspected, and what is printed about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafters.heads.files import Checkpoint
from experiments.config.pairs import check_files
from experiments.config.sections import build, plain
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
    check_components(config, {"": "drafter"}, ("target",))
    options = plain(config, "drafter")
    if options.get("_target_") is None:
        raise ValueError("drafter=none drafts nothing, so there is nothing to inspect: give another drafter")
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
            tokens=config.tokens,
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


def _checkpoint(options: dict[str, Any], target: Target) -> Checkpoint | None:
    """Returns the files that a drafter was loaded from; None if there are none with a ``config.json``."""
    name = options.get("name") or target.model.config.name_or_path
    if not name or (Path(name).exists() and not Path(name).is_dir()):
        return None
    try:
        return Checkpoint(name, **{key: options[key] for key in _WHERE if options.get(key) is not None})
    except ValueError:
        return None
