"""A replay assembled: the traced runs, the rules that are asked, and the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.app.config import CONF, build
from experiments.app.settings import did_you_mean
from experiments.reporting.replay import report_replay
from experiments.results.comparison import distinguishing
from experiments.results.origin import read_manifest
from experiments.results.statistics import Bootstrap
from experiments.tracing.draft_sets import find_drafts
from experiments.tracing.figures import RAN, DraftSetFigures, figures
from experiments.tracing.orderings import orderings
from experiments.tracing.scoring import score
from specdec.interfaces import Verifier


def replay_runs(
    folders: Sequence[Path], rules: Mapping[str, Verifier], out: Path, *, baseline: str, bootstrap: Bootstrap
) -> list[DraftSetFigures]:
    """Ask rules about the drafts of traced runs; print and write what they say.

    Args:
        folders: Folders of runs with traces.
        rules: The rules, by name.
        out: Folder for ``replay.md``, ``.csv``, ``.json``, ``.png`` and the folder ``reach``.
        baseline: Name of the rule that differences are over.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: A folder has no trace, or no rule fits.
    """
    manifests = [read_manifest(folder) for folder in folders]
    done: list[DraftSetFigures] = []
    scored = []
    for folder, manifest, settings in zip(folders, manifests, distinguishing(manifests), strict=True):
        parts = [part for part in settings if not part.startswith("sampling.temperature=")]
        ran = build(OmegaConf.create({"verifier": manifest["config"]["verifier"]}), "verifier")
        for drafts in find_drafts(folder, parts, ran):
            scores, bound = score(drafts, {**rules, RAN: ran})
            scored += [found for found in scores if found.rule != RAN]
            done.append(figures(drafts, scores, bound, baseline=baseline, bootstrap=bootstrap))
    done.sort(key=lambda each: each.drafts.temperature)
    if not any(row for each in done for row in each.rows):
        raise ValueError(f"none of {', '.join(rules)} fits these drafts: {done[0].refused[0][1]}")
    found = orderings(scored, bootstrap)
    report_replay(done, found, out, baseline=baseline, confidence=bootstrap.confidence, manifests=manifests)
    return done


def verifier_names() -> list[str]:
    """The names of the files in ``conf/verifier``."""
    return sorted(path.stem for path in (CONF / "verifier").glob("*.yaml"))


def named_verifiers(given: Any) -> dict[str, Verifier]:
    """Rules by the names of their files in ``conf/verifier``, with other arguments if they are given."""
    names = verifier_names()
    entries = names if given is None else given if isinstance(given, list) else [given]
    found: dict[str, Verifier] = {}
    for entry in entries:
        more = dict(entry) if isinstance(entry, dict) else {"name": entry}
        name = more.pop("name", None)
        if name not in names:
            raise ValueError(f"there is no verifier {name!r}{did_you_mean(str(name), names)}")
        options: Any = OmegaConf.load(CONF / "verifier" / f"{name}.yaml")
        for key in more:
            if key not in options:
                known = [str(k) for k in options if not str(k).startswith("_")]
                raise ValueError(f"verifier {name} has no {key!r}{did_you_mean(str(key), known)}")
        label = ", ".join([str(name), *(f"{key}={value}" for key, value in more.items())])
        found[label] = build(OmegaConf.create({"verifier": OmegaConf.merge(options, more)}), "verifier")
    return found
