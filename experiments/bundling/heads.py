"""Puts heads that ``experiments.train`` has made among the bundled models, with their cards and checksums."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import logging as transformers_logging

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from experiments.results.comparison import commit_of
from experiments.results.origin import read_manifest
from specdec import bundled
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier

CARD, FACTS, BEST = "MODEL_CARD.md", "training.json", "best"
_BEGIN, _END = "<!-- heads:begin -->", "<!-- heads:end -->"
_OWN = ("out=", "threads=", "resume=", "regenerate.file=", "hydra.", "progress_every=", "tracker")
"""Overrides that do not change what is trained."""
_RECIPE = ("head", "loss", "weights", "data", "regenerate", "fit", "served", "seed", "mixed_precision")
_TRIED = "import os\n\n\ndef read_lines(path):\n"


@dataclass(frozen=True)
class Kind:
    """What a head is, and how it is loaded."""

    says: str
    drafter: Any


KINDS: dict[str, Kind] = {
    "TrainedEagle3": Kind("EAGLE-3 head", EagleDrafter),
    "TrainedBlock": Kind("block drafter's head", BlockDrafter),
    "TrainedMedusa": Kind("Medusa heads", MedusaDrafter),
    "TrainedMTP": Kind("MTP module", MTPDrafter),
}
"""The heads that can be bundled, by the class that trained them."""


def install_heads(trainings: Mapping[str, str | None], out: Path) -> None:
    """Copy the best weights of trainings into the folder of bundled models, and write cards and checksums.

    Nothing is copied unless every head loads, drafts in the engine without changing a greedy output, and all files
    together stay below ``bundled.MOST_BYTES``.

    Args:
        trainings: Folders of trainings (``experiments.train``), by the name that each head gets. None leaves a name as
            it is.
        out: The folder of bundled models.

    Raises:
        ValueError: A folder holds no such training, or a head that does not work, or the files are too large.
    """
    given = {name: Path(folder) for name, folder in trainings.items() if folder is not None}
    if not given:
        raise ValueError("there is no head to install: give heads.eagle3=FOLDER of a finished training")
    known = {name: _facts(name, folder) for name, folder in given.items()}
    _check_size(given, out)
    transformers_logging.disable_progress_bar()
    target_name = str(out / "target") if (out / "target" / "config.json").is_file() else f"{bundled.PREFIX}target"
    target = Target.from_pretrained(target_name, dtype="float32", device="cpu")
    lengths = {name: _try(name, folder / BEST, known[name], target) for name, folder in given.items()}
    for name, folder in given.items():
        place = out / name
        shutil.rmtree(place, ignore_errors=True)  # nothing of an earlier head may stay
        shutil.copytree(folder / BEST, place)
        for path in place.iterdir():
            path.chmod(0o644)
        (place / CARD).write_text(head_card(name, known[name], read_manifest(folder)), encoding="utf-8")
        print(f"{name}: {lengths[name]:.2f} tokens per round on one prompt; installed in {place}")
    _list_heads(out)
    (out / bundled.SUMS).write_text(bundled.checksums(out), encoding="utf-8")
    total = sum(path.stat().st_size for path in bundled.files(out))
    print(f"all bundled models: {total / 1e6:.1f} MB of {bundled.MOST_BYTES / 1e6:.0f}")


def head_card(name: str, facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Returns the card of a head, in Markdown.

    Args:
        name: Its name.
        facts: ``training.json`` beside its weights.
        manifest: What made the training.
    """
    config, versions = manifest["config"], manifest["versions"]
    given = " ".join(text for text in manifest["overrides"] if not text.startswith(_OWN))
    recipe = yaml.safe_dump(_portable({key: config[key] for key in _RECIPE if key in config}), sort_keys=False)
    rows = [
        ("what", f"{KINDS[facts['head']].says} for {facts['target']}, {facts['parameters']:,} parameters, bfloat16"),
        ("data", f"{facts['tokens']:,} tokens in {facts['documents']:,} documents, see [the target's card](../{CARD})"),
        ("weights of", f"step {facts['step']} of {config['fit']['steps']}, which had the greatest served length"),
        *_figures(facts["figures"]),
        ("made by", f"`python -m experiments.train {given}`, commit {commit_of(manifest)}, torch {versions['torch']}"),
    ]
    table = "\n".join(f"| {left} | {right} |" for left, right in rows)
    return f"""# Model card: bundled/{name}

For demonstrations and tests of speculative decoding with the bundled target, and for nothing else.

| | |
|---|---|
{table}

*Served length* is the mean acceptance length of chains in the engine, on held-out prompts. *Accuracy* is how often the
most probable token is the target's, by depth, when the tokens before it are given.

```yaml
{recipe}```
"""


def _portable(value: Any) -> Any:
    """Returns settings without the folders of the machine that they were used on."""
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _figures(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    served = [(name.partition("=")[2], value) for name, value in figures.items() if name.startswith("served_length/")]
    depths = {int(name.rpartition("/")[2]): value for name, value in figures.items() if "held_out/accuracy/" in name}
    rows = [("served length", ", ".join(f"{value:.2f} at T={temperature}" for temperature, value in served))]
    if depths:
        rows.append(("held-out accuracy", ", ".join(f"{depths[depth]:.0%}" for depth in sorted(depths))))
    return [row for row in rows if row[1]]


def _facts(name: str, folder: Path) -> dict[str, Any]:
    """Returns what a training says of its best weights.

    Raises:
        ValueError: There is none, or it is of another kind or for another target.
    """
    if name in ("target", "drafter"):
        raise ValueError(f"heads.{name}: the target and the small model are stages of their own, give another name")
    path = folder / BEST / FACTS
    if not path.is_file():
        raise ValueError(f"heads.{name}={folder}: there is no {BEST}/{FACTS}, give the folder of a training")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if facts["head"] not in KINDS:
        raise ValueError(f"heads.{name}={folder} holds a {facts['head']}: give one of {', '.join(KINDS)}")
    if facts["target"] != f"{bundled.PREFIX}target":
        raise ValueError(f"heads.{name}={folder} was trained for {facts['target']}: give a head for bundled/target")
    return facts


def _check_size(given: Mapping[str, Path], out: Path) -> None:
    """Refuse heads that make the package too large.

    Raises:
        ValueError: Says how large all models would be together.
    """
    kept = sum(path.stat().st_size for path in bundled.files(out) if path.parent.name not in given)
    new = sum(path.stat().st_size for folder in given.values() for path in (folder / BEST).iterdir())
    if kept + new > bundled.MOST_BYTES:
        raise ValueError(
            f"all bundled models would have {(kept + new) / 1e6:.1f} MB, more than {bundled.MOST_BYTES / 1e6:.0f}: "
            f"leave {', '.join(given)} out, or train smaller ones"
        )


def _try(name: str, folder: Path, facts: Mapping[str, Any], target: Target) -> float:
    """Returns the tokens per round of a head on one prompt.

    Raises:
        ValueError: It cannot be loaded, or the output is not plain decoding's.
    """
    drafter: Drafter = KINDS[facts["head"]].drafter.from_pretrained(str(folder))
    sampling = SamplingParams(max_new_tokens=32, ignore_eos=True)
    with Engine(target, drafter, RejectionVerifier(), max_length=128) as engine:
        (plain,) = engine.generate([_TRIED], sampling, speculate=False)
        (done,) = engine.generate([_TRIED], sampling)
    if done.token_ids != plain.token_ids:
        raise ValueError(f"heads.{name}={folder.parent} changes greedy outputs: it must not be bundled")
    return len(done.token_ids) / len(done.steps)


def _list_heads(out: Path) -> None:
    """Bring the list of heads in the card of all models up to date."""
    path = out / CARD
    if not path.is_file():
        return
    rows = []
    for card in sorted(out.glob(f"*/{CARD}")):
        facts = json.loads((card.parent / FACTS).read_text(encoding="utf-8"))
        what = f"{KINDS[facts['head']].says}, {facts['parameters']:,} parameters"
        rows.append(f"| `{bundled.PREFIX}{card.parent.name}` | {what} | [card]({card.parent.name}/{CARD}) |")
    trained = "Trained with `python -m experiments.train`; their own cards have recipe and figures."
    table = ["| name | is | |", "|---|---|---|", *rows]
    section = "\n".join([_BEGIN, "## Heads", "", trained, "", *table, _END])
    text = path.read_text(encoding="utf-8")
    if (out / "medusa" / CARD).is_file():
        text = re.sub(r"(?m)^\| Medusa heads \|.*$", f"| Medusa heads | see [their card](medusa/{CARD}) |", text)
    before, found, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if found else "\n"
    path.write_text(f"{before.rstrip()}\n\n{section}{after}", encoding="utf-8")
