"""A drafter exported as a configuration says, and what is printed about it."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import AutoConfig, PreTrainedConfig

import specdec
from drafters.heads.files import ServedFor
from experiments.config.sections import plain, typed
from experiments.exporting.folders import (
    KINDS,
    Found,
    Source,
    check_folder,
    check_format,
    kind_of,
    notes_of,
    read,
    write,
)
from experiments.reporting import terminal
from experiments.results.revision import revision_of
from experiments.session.engines import quiet_hub
from specdec import bundled
from specdec.interfaces import Description
from specdec.machine import dtype_name


def export(config: DictConfig) -> list[Path]:
    """Export the drafter of a checked configuration, print what it is and how it is served, and return the files."""
    quiet_hub()
    asked = plain(config, "export")
    source = typed(Source, {"name": asked} if isinstance(asked, str) else asked, "export")
    folder = Path(config.out).expanduser()
    check_folder(folder, source.name, overwrite=config.overwrite)  # before anything is read
    kind = kind_of(source.name)
    check_format(kind, source.name, config.format)
    given = plain(config, "target").get("name")
    target = given or str(notes_of(source.name).get("target") or "")
    if config.format == "speculators" and not target:
        raise ValueError("format=speculators names the target, and the drafter's files do not: give target.name=NAME")
    target_config = _config_of(target)
    if given is not None and target_config is None and Path(given).exists():
        raise ValueError(f"target.name={given}: there is no config.json of a model that transformers knows")
    found = read(source, kind, target_config)
    usual = KINDS[found.kind].tokens(found.module)
    if config.tokens is not None and KINDS[found.kind].bounded and config.tokens > usual:
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
    _say(found, folder, config.format, served, written, known=target_config is not None)
    return written


def _say(found: Found, folder: Path, layout: str, served: ServedFor, written: list[Path], *, known: bool) -> None:
    out = terminal.console()
    title = KINDS[found.kind].title.removeprefix("an ").removeprefix("a ")
    terminal.say(out, f"{title[0].upper()}{title[1:]}: {'; '.join(_facts(found))}")
    if not served.target:
        terminal.say(out, "its files name no target, so it was compared with none: give target.name=NAME to do so")
    elif not known:
        terminal.say(
            out, f"the configuration of {served.target} is not on this machine, so it was not compared with it"
        )
    remark = KINDS[found.kind].remark(found.module, layout)
    terminal.say(out, *([remark] if remark else []))
    terminal.list_written(out, written)
    terminal.say(out, "read back and compared: equal")
    tokens = served.tokens or KINDS[found.kind].tokens(found.module)
    for engine, line in _commands(found.kind, folder, layout, served.target, tokens):
        out.print(f"{engine}: {line}", highlight=False, markup=False, soft_wrap=True)


def _facts(found: Found) -> list[str]:
    """A drafter's sizes and numbers."""
    parameters = list(found.module.parameters())
    facts = [f"{sum(each.numel() for each in parameters):,} parameters in {dtype_name(parameters[0].dtype)}"]
    describe = getattr(found.module, "describe", None)  # a small model is one of transformers
    if describe is not None:
        known: Description = describe()
        facts += [f"reads the inputs of layers {', '.join(map(str, known.reads))}"] if known.reads[1:] else []
        facts += [f"{subject}: {fact}" for subject, fact in known.facts.items()]
        facts += [] if known.tokens is None else [f"drafts {len(known.tokens):,} tokens"]
    return facts


def _commands(kind: str, folder: Path, layout: str, target: str, tokens: int) -> Iterator[tuple[str, str]]:
    """Engines, and the command with which each serves what was written.

    Args:
        target: The target's name; empty if it is not known.
    """
    model, known, place = shlex.quote(target) if target else "TARGET", KINDS[kind], shlex.quote(str(folder))
    vllm, sglang = known.serves.get("vLLM"), known.serves.get("SGLang")
    if layout == "speculators" and vllm is not None:
        yield "vLLM", f"vllm serve {place}"
    if vllm is not None and layout != "sglang":
        setting = {"method": vllm["method"], "model": str(folder), "num_speculative_tokens": tokens, **vllm}
        yield "vLLM", f"vllm serve {model} --speculative-config {shlex.quote(json.dumps(setting))}"
    if sglang is not None and layout == "sglang":
        line = f"python -m sglang.launch_server --model-path {model} --speculative-algorithm {sglang['algorithm']}"
        line += f" --speculative-draft-model-path {place}"
        if "mask_token_id" not in known.takes:  # a block's length is in its configuration
            line += f" --speculative-num-steps {tokens} --speculative-eagle-topk 1"
            line += f" --speculative-num-draft-tokens {tokens + 1}"
        yield "SGLang", line


def _config_of(target: str) -> PreTrainedConfig | None:
    """A target's configuration; None if it has no name, or is neither here nor to be had."""
    if not target:
        return None
    try:
        return AutoConfig.from_pretrained(bundled.resolve(target))
    except (OSError, ValueError):
        return None
