"""Does a drafter keep its contract, is a rule exact, is a head loaded? ``python -m experiments.check drafter=ngram``.

``verifier=block`` tries a rule: its output law is computed on tables. A folder is inspected: what the drafter in it is,
by its files; its acceptance by depth in texts that the target writes, beside what such heads usually bring; and what
the likeliest other ways to load it would bring, such as other hidden layers, another norm or another mask token.
"""

from dataclasses import dataclass
from typing import Annotated

from omegaconf import DictConfig

from experiments.config.kinds import (
    Count,
    EngineSettings,
    Natural,
    Options,
    Positive,
    Section,
    Texts,
    Two,
    Wanted,
    least,
)
from experiments.config.launch import Command
from experiments.config.words import with_folders


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What ``conf/check.yaml`` holds."""

    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    inspect: bool
    prompts: Texts
    tokens: Annotated[int, least(8)] | None
    rounds: Two
    draws: Natural
    every_rule: bool
    depths: Count | None
    vocab: Two
    tables: Count
    temperatures: Annotated[list[Positive], Wanted("at least one temperature, each above 0", bool)]
    streams: Annotated[int, least(100)]
    threshold: Positive
    chat_template: Options
    seed: Natural
    threads: Count | None


def _work(config: DictConfig) -> str:
    if config.inspect:
        return "inspect_drafter"
    drafter, verifier = (config[part].get("_target_") for part in ("drafter", "verifier"))
    if (drafter is None) == (verifier is None):
        raise ValueError(
            f"drafter._target_={drafter} and verifier._target_={verifier}: give drafter=NAME or verifier=NAME to "
            f"check, or a folder to inspect"
        )
    return "check_drafter" if verifier is None else "check_verifier"


def _rewrite(words: list[str]) -> list[str]:
    """``experiments.check FOLDER`` is short for ``inspect=true drafter.name=FOLDER``."""
    found = with_folders(words, "++drafter.name", several=False)
    return ["inspect=true", *found] if found and found[0].startswith("++drafter.name=") else found


check = Command("check", CheckSettings, work=_work, rewrite=_rewrite)
main = check.main

if __name__ == "__main__":
    main()
