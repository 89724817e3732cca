"""A drafter inspected, and what is printed about it."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from drafters.heads.files import Checkpoint
from experiments.app.components import check_components
from experiments.app.config import build, plain
from experiments.app.engines import settle
from experiments.app.pairs import check_files
from experiments.inspecting.facts import facts_of, trained_on
from experiments.inspecting.families import USUAL, family_of, kind_of
from experiments.inspecting.search import Inspection, inspect
from experiments.inspecting.text import prompts_of, text_of
from experiments.reporting import terminal
from experiments.reporting.inspection import facts_table, predictions_table, tried_table, verdict
from specdec.interfaces import Drafter
from specdec.target.target import Target

_WHERE = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


def inspect_drafter(config: DictConfig) -> Inspection:
    """Inspect the drafter of a checked configuration, and print what it is, what it predicts, and the verdict.

    Raises:
        ValueError: There is no drafter, or none with a trained head, or it does not load, or does not fit the target.
    """
    settle(config)
    check_components(config, {"": "drafter"}, ("target",))
    options = plain(config, "drafter")
    name = options.get("_target_")
    if name is None:
        raise ValueError("drafter=none drafts nothing, so there is nothing to inspect: give another drafter")
    check_files(config)
    drafter: Drafter = build(config, "drafter")
    target: Target = build(config, "target")
    screen = Console(stderr=True)
    with screen.status("drafter") as status:
        prompts = prompts_of(target, config.prompts, config.seed)
        longest = max(map(len, prompts)) + config.tokens + 2
        drafter.bind(target, max_batch_size=1, max_length=min(longest, target.max_length))
        family = family_of(drafter, target)
        depths = family.depths if config.depths is None else min(config.depths, family.depths)
        depths = max(1, min(depths, config.tokens // 2))
        status.update("the target writes")
        text = text_of(target, prompts, tokens=config.tokens, depths=depths, places=config.places, seed=config.seed)
        found = inspect(family, text, lambda what: status.update(f"trying: {what}"))
    checkpoint = _checkpoint(options, target)
    said = None if checkpoint is None else trained_on(checkpoint)
    title = f"{type(drafter).__name__} {options.get('name') or ''}".strip()
    usual = USUAL.get(kind_of(family))
    console = terminal.console()
    for table in (
        facts_table(f"{title}, inspected with {target.name}", facts_of(family, drafter, found, checkpoint)),
        predictions_table(found, usual),
        *([tried_table(found)] if found.tried else []),
    ):
        console.print(terminal.render(table, terminal.Frame.NARROW))
    terminal.say(console, *verdict(title, target.name, found, usual, said))
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
