"""Every rule on the very drafts of a trace: ``python -m experiments.replay trace=outputs/run/… verifiers=[block]``.

Make the trace with ``experiments.run trace=true``. No acceptance is sampled: a rule's expectation follows from its two
laws. So two rules differ by what they are alone, and an interval covers the choice of prompts alone.

**What is compared** is one round on identical contexts. The contexts are those that the rule which ran has led to; a
rule that accepts more would have met later ones. In the long run all exact rules meet contexts of the same
distribution, except where in the text their rounds begin; a lossy rule's own contexts are others.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from experiments.config.checking import did_you_mean
from experiments.config.groups import option_names, sections
from experiments.config.launch import launch
from experiments.config.sections import bootstrap_of, check_early, plain
from experiments.config.settings import REPLAY
from experiments.config.words import bare_words

if TYPE_CHECKING:
    from experiments.tracing.figures import DraftSetFigures


def replay(config: DictConfig) -> "list[DraftSetFigures]":
    """Ask the configuration's verifiers, or all, about the drafts of a trace; print and write what they say."""
    if OmegaConf.is_missing(config, "trace"):
        raise ValueError("trace has no value: give trace=FOLDER, of a run made with trace=true or of a sweep of them")
    check_early(config, REPLAY)
    given = plain(config, "verifiers")
    labels = sections("verifier", given)
    if config.baseline not in {*labels, *option_names("verifier")}:
        raise ValueError(f"baseline: there is no verifier {config.baseline!r}{did_you_mean(config.baseline, labels)}")
    import torch

    from experiments.commands.replay import named_verifiers, replay_runs
    from experiments.results.runs import jobs_of

    bootstrap = bootstrap_of(config)
    rules = named_verifiers(given)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folders = jobs_of(Path(config.trace))
    return replay_runs(folders, rules, Path(config.out), baseline=config.baseline, bootstrap=bootstrap)


def main() -> None:
    """Replay; ``experiments.replay FOLDER verifier=a,b`` is short for ``trace=FOLDER verifiers=[a,b]``."""
    sys.argv[1:] = _overrides(sys.argv[1:])
    launch(replay, "replay")


def _overrides(arguments: list[str]) -> list[str]:
    words = list(arguments)
    for position in bare_words(words):
        words[position] = f"trace={words[position]}"
    return [
        f"verifiers=[{word.removeprefix('verifier=').strip('[]')}]" if word.startswith("verifier=") else word
        for word in words
    ]


if __name__ == "__main__":
    main()
