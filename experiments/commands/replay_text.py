"""A replay over texts assembled: files, tokenizer, drafters and the report. Heavy modules are imported when it runs."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.groups import sections
from experiments.config.sections import build, plain

if TYPE_CHECKING:
    from experiments.datasets.answered import Answered
    from experiments.results.statistics import Bootstrap
    from experiments.results.texts import LookUp
    from specdec.interfaces import Drafter


def labelled(given: list[Any]) -> dict[str, DictConfig]:
    """Returns the sections of drafters by their labels.

    Args:
        given: Entries as ``experiments.config.groups.sections`` takes them, with a ``label`` if they are dictionaries.

    Raises:
        ValueError: An entry is none of these, or two have the same label.
    """
    entries = [dict(entry) if isinstance(entry, Mapping) else entry for entry in given]
    labels = [entry.pop("label", None) if isinstance(entry, dict) else None for entry in entries]
    found: dict[str, DictConfig] = {}
    for entry, label in zip(entries, labels, strict=True):
        ((name, section),) = sections("drafter", [entry]).items()
        if (label or name) in found:
            raise ValueError(f"drafters: two are called {label or name!r}: give one of them another label")
        found[str(label or name)] = section
    return found


def replay_files(config: DictConfig, sections_of: Mapping[str, DictConfig], bootstrap: "Bootstrap") -> "list[LookUp]":
    """Replay drafters over the texts of a configuration, and report.

    Args:
        config: A checked configuration.
        sections_of: The drafters' sections by label.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: There is no such file or tokenizer, a drafter needs a model, or no text has an answer.
    """
    from rich.console import Console
    from rich.progress import track

    from experiments.measuring.forced import Forced, TextTarget
    from experiments.reporting.replay_text import report_texts
    from experiments.results.texts import Rounds, look_up
    from specdec.target.loading import load_tokenizer

    given = plain(config, "texts")
    files = [str(each) for each in given] if isinstance(given, list) else [str(given)]
    texts = _texts(files, config.per_category)
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise ValueError(f"tokenizer={config.tokenizer}: there is no tokenizer of that name")

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    encoded = [(each.category, tokens(each.prompt), tokens(each.answer)) for each in texts]
    longest = max(len(prompt) + len(answer) for _, prompt, answer in encoded)
    target = TextTarget(tokenizer, str(config.tokenizer))
    made = {label: Forced(_built(section), target, longest) for label, section in sections_of.items()}
    done: list[LookUp] = []
    screen = Console(stderr=True)
    for label, forced in made.items():
        shown = track(encoded, label, console=screen, transient=True, disable=not screen.is_terminal)
        played = [(category, forced.replay(prompt, answer)) for category, prompt, answer in shown]
        counted = [Rounds(name, len(each.accepted), each.tokens, sum(each.nodes)) for name, each in played]
        done.append(look_up(label, counted, bootstrap))
    report_texts(done, Path(config.out), files=files, tokenizer=target.name, bootstrap=bootstrap)
    return done


def _built(section: DictConfig) -> "Drafter":
    return build(OmegaConf.create({"drafter": section}), "drafter")


def _texts(files: list[str], per_category: int | None) -> list["Answered"]:
    from experiments.datasets.answered import answered

    taken: Counter[str] = Counter()
    found: dict[str, list[Answered]] = defaultdict(list)
    for file in files:
        for each in answered(file, Path(file).stem):
            if per_category is None or taken[each.category] < per_category:
                taken[each.category] += 1
                found[file].append(each)
    for file in files:
        if not found[file]:
            raise ValueError(
                f"texts: no line of {file} has an answer: give rows with turns and a reference, with a prompt and an "
                f"answer, or with messages in which an assistant speaks"
            )
    return [each for file in files for each in found[file]]
