"""Every rule on the very drafts of a trace: ``python -m experiments.replay trace=outputs/run/… verifiers=[block]``.

Make the trace with ``experiments.run trace=true``. No acceptance is sampled: a rule's expectation follows from its two
laws, so what differs between two rules is the rules, and what an interval covers is the choice of prompts.

**What is compared** is one round on identical contexts. The contexts are those that the rule which ran has led to: a
rule that accepts more would have met later ones. Exact rules all meet contexts of the same distribution in the long
run, up to where their rounds begin; a lossy rule's own contexts are others.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.cli import launch
from experiments.compare import jobs_of
from experiments.comparison import distinguishing
from experiments.config import CONF, build, check_arguments
from experiments.manifest import read_manifest
from experiments.orderings import orderings
from experiments.replay_plot import reach_plot
from experiments.replay_report import RAN, Figures, figures, ordering_table, replay_table, write
from experiments.scoring import find_drafts, score
from experiments.session import PIPE_WIDTH, short
from experiments.summary import Bootstrap
from specdec.interfaces import Verifier

CONTEXTS = (
    "One-round expectations on identical contexts: those that the rule which ran has led to, where another rule would "
    "have met others."
)


def replay(config: DictConfig) -> list[Figures]:
    """Ask the configuration's verifiers, or all, about the drafts of a trace; print and write what they say."""
    if OmegaConf.is_missing(config, "trace"):
        raise ValueError("trace has no value: give trace=FOLDER, of a run made with trace=true or of a sweep of them")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_arguments(Bootstrap, dict(config.bootstrap), "bootstrap")
    rules = named_verifiers(OmegaConf.to_container(config.verifiers) if config.verifiers is not None else None)
    return replay_runs(
        jobs_of(Path(config.trace)),
        rules,
        Path(config.out),
        baseline=config.baseline,
        bootstrap=Bootstrap(**config.bootstrap),
    )


def replay_runs(
    folders: Sequence[Path], rules: Mapping[str, Verifier], out: Path, *, baseline: str, bootstrap: Bootstrap
) -> list[Figures]:
    """The same from components.

    Args:
        folders: Of runs with traces.
        rules: By name.
        out: Takes ``replay.json``, ``replay.md`` and ``replay.png``.
        baseline: Name of the rule that differences are over.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: A folder has no trace, or no rule fits.
    """
    manifests = [read_manifest(folder) for folder in folders]
    done: list[Figures] = []
    pieces = []
    for folder, manifest, settings in zip(folders, manifests, distinguishing(manifests), strict=True):
        parts = [part for part in settings if not part.startswith("sampling.temperature=")]
        ran = build(OmegaConf.create({"verifier": manifest["config"]["verifier"]}), "verifier")
        for drafts in find_drafts(folder, parts, ran):
            scores, bound = score(drafts, {**rules, RAN: ran})
            pieces += [found for found in scores if found.rule != RAN]
            done.append(figures(drafts, scores, bound, baseline=baseline, bootstrap=bootstrap))
    done.sort(key=lambda each: each.drafts.temperature)
    if not any(row for each in done for row in each.rows):
        raise ValueError(f"none of {', '.join(rules)} fits these drafts: {done[0].refused[0][1]}")
    found = orderings(pieces, bootstrap)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    first = manifests[0]
    title = f"{first['target']['name']} ({first['dtype']}) on {first['device']}, {first['prompts']} prompts"
    console.print(replay_table(done, title, bootstrap.confidence))
    if found:
        console.print(ordering_table(found, bootstrap.confidence))
    notes = [CONTEXTS, *remarks(done)]
    for note in notes:
        console.print(note, highlight=False, markup=False)
    written = write(out, done, found, title, notes, bootstrap.confidence, manifests)
    written.append(reach_plot(done, out / "replay.png", title))
    listed = "\n".join(["wrote", *(f"  {short(path)}" for path in written)])
    console.print(listed, highlight=False, markup=False, soft_wrap=True)
    return done


def remarks(done: Sequence[Figures]) -> list[str]:
    """What a reader of the table has to know besides, refusals above all."""
    notes = [
        "Bound: the probability of accepting one of the root's sampled siblings, over their draws, that no lossless "
        "rule exceeds (optimal transport); of the first position only, whatever the rule does below. A rule's own "
        "figure is of the drafts that were drawn, and may lie above it by chance."
    ]
    refused: dict[tuple[str, str], dict[str, str]] = {}
    for each in done:
        for rule, reason in each.refused:
            # One sentence for all that differ in a row's number or a vocabulary's size.
            refused.setdefault((rule, re.sub(r"[\d,]+", "", reason)), {}).setdefault(each.label, reason)
    every = {each.label for each in done}
    for (rule, _), reasons in refused.items():
        where = "any of the drafts" if reasons.keys() == every else "; ".join(reasons)
        notes.append(f"Not asked: {rule}, about {where}: {next(iter(reasons.values()))}")
    errors = [each for each in done if each.error is not None]
    if errors:
        mean = max(errors, key=lambda each: abs(each.error[0]) if each.error else 0.0)
        row = max(errors, key=lambda each: each.error[1] if each.error else 0.0)
        assert mean.error is not None and row.error is not None
        notes.append(
            f"What compression does: the rule that ran expects at most {mean.error[0]:+.1g} accepted tokens per round "
            f"here over what it had expected then ({mean.label}, T={mean.drafts.temperature:g}), in a single round at "
            f"most {row.error[1]:.1g}."
        )
    return notes


def named_verifiers(given: Any) -> dict[str, Verifier]:
    """Rules by the names of their files in ``conf/verifier``, with other arguments if they are given."""
    names = sorted(path.stem for path in (CONF / "verifier").glob("*.yaml"))
    entries = names if given is None else given if isinstance(given, list) else [given]
    found: dict[str, Verifier] = {}
    for entry in entries:
        more = dict(entry) if isinstance(entry, dict) else {"name": entry}
        name = more.pop("name", None)
        if name not in names:
            raise ValueError(f"there is no verifier {name!r}: choose of {', '.join(names)}")
        options: Any = OmegaConf.load(CONF / "verifier" / f"{name}.yaml")
        for key in more:
            if key not in options:
                raise ValueError(
                    f"verifier {name} has no {key!r}: choose of {', '.join(k for k in options if k[0] != '_')}"
                )
        label = ", ".join([str(name), *(f"{key}={value}" for key, value in more.items())])
        found[label] = build(OmegaConf.create({"verifier": OmegaConf.merge(options, more)}), "verifier")
    return found


def main() -> None:
    """Replay; ``experiments.replay FOLDER verifier=a,b`` is ``trace=FOLDER verifiers=[a,b]``."""
    sys.argv[1:] = [_override(argument) for argument in sys.argv[1:]]
    launch(replay, "replay")


def _override(argument: str) -> str:
    if argument.startswith("verifier="):
        return f"verifiers=[{argument.removeprefix('verifier=').strip('[]')}]"
    return argument if "=" in argument or argument.startswith("-") else f"trace={argument}"


if __name__ == "__main__":
    main()
