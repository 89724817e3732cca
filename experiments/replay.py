"""Every rule on the very drafts of a trace: ``python -m experiments.replay outputs/traced verifier=block,rejection``.

``best=tree`` finds the best static tree for the drafter that was traced, and measures what it brings.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from experiments.config.groups import option_names, sections
from experiments.config.kinds import Count, Natural, OneOrMore, Section, Settings, Text, Wanted, did_you_mean
from experiments.config.launch import Command
from experiments.config.words import with_folders


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """What ``conf/replay.yaml`` holds."""

    seed: Natural
    trace: Annotated[OneOrMore[Text], Wanted("the folder of a run made with trace=true, or a list of them")]
    verifiers: Any
    baseline: Text
    best: Literal["tree"] | None
    method: Text | None
    max_nodes: Count
    max_depth: Count | None
    costs: Text
    rounds: Count
    old: Any
    measure: bool
    target: Section
    drafter: Section
    verifier: Section
    sampling: Section
    dataset: Section
    engine: Section
    bootstrap: Section
    title: bool = True

    def __post_init__(self) -> None:
        names = [*sections("verifier", self.verifiers), *option_names("verifier")]
        if self.baseline not in names:
            raise ValueError(f"baseline: there is no verifier {self.baseline!r}{did_you_mean(self.baseline, names)}")


def _rewrite(words: list[str]) -> list[str]:
    """``experiments.replay FOLDER verifier=a,b`` is short for ``trace=FOLDER verifiers=[a,b]``."""
    return [
        f"verifiers=[{word.removeprefix('verifier=').strip('[]')}]" if word.startswith("verifier=") else word
        for word in with_folders(words, "trace")
    ]


replay = Command(
    "replay", ReplaySettings, work=lambda config: "replay" if config.best is None else "best_tree", rewrite=_rewrite
)
main = replay.main

if __name__ == "__main__":
    main()
