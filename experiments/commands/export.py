"""A drafter exported as a configuration says, and what is printed about it."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import specdec
from drafters.heads.files import ServedFor
from experiments.config.sections import plain, typed
from experiments.exporting.folders import KINDS, Source, check_folder, check_format, kind_of, notes_of, read, write
from experiments.reporting import terminal
from experiments.results.manifest import revision_of
from experiments.session.engines import quiet_hub
from specdec import bundled
from specdec.machine import dtype_name
from specdec.target.loading import load_config


def export(config: DictConfig) -> Path:
    """Export the drafter of a checked configuration, print what it is and how it is served, and return the folder."""
    quiet_hub()
    asked = plain(config, "export")
    source = typed(Source, {"name": asked} if isinstance(asked, str) else asked, "export")
    folder = Path(config.out).expanduser()
    check_folder(folder, source.name, overwrite=config.overwrite)  # before anything is read
    name = kind_of(source.name)
    check_format(name, source.name, config.format)
    given = plain(config, "target").get("name")
    target = given or str(notes_of(source.name).get("target") or "")
    if config.format == "speculators" and not target:
        raise ValueError("format=speculators names the target, and the drafter's files do not: give target.name=NAME")
    try:
        target_config = load_config(target) if target else None
    except (OSError, ValueError) as error:  # it is neither here nor to be had
        if given is not None and Path(given).exists():
            raise ValueError(f"target.name={given}: there is no config.json that transformers knows") from error
        target_config = None
    found = read(source, name, target_config)
    kind = KINDS[found.kind]
    usual = kind.tokens(found.module)
    if config.tokens is not None and kind.bounded and config.tokens > usual:
        raise ValueError(f"tokens={config.tokens}: {source.name} drafts {usual} tokens per round, give at most as many")
    served = ServedFor(
        target=bundled.resolve(target),
        architectures=tuple(getattr(target_config, "architectures", None) or ()),
        tokens=config.tokens,
    )
    notes: dict[str, Any] = {"exported_from": source.name, "exported_by": f"specdec {specdec.__version__}"}
    if target:
        notes |= {"target": target, "target_revision": revision_of(target)}
    written = write(found, folder, config.format, served, target=target_config, notes=notes)
    out, parameters = terminal.console(), list(found.module.parameters())
    amount = f"{sum(each.numel() for each in parameters):,} parameters in {dtype_name(parameters[0].dtype)}"
    alone = f"it was compared with no target (target.name={target or 'null'}), whose files are not here"
    remarks = (alone if target_config is None else None, kind.remark(found.module, config.format))
    terminal.say(out, f"{kind.title}: {amount}", *filter(None, remarks))
    terminal.list_written(out, written)
    terminal.say(out, "read back and compared: equal")
    return folder
