"""Drafters replayed over texts whose answers are known."""

from collections import Counter, defaultdict
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track

from experiments.config.groups import labelled
from experiments.config.sections import bootstrap_of, build, listed, plain
from experiments.datasets.answered import Answered, answered
from experiments.measuring.forced import Forced, TextTarget
from experiments.reporting.replay_text import look_up, report_texts
from experiments.results.frame import Figures
from specdec.interfaces import Drafter
from specdec.target.loading import load_tokenizer


def replay_text(config: DictConfig) -> list[Figures]:
    """Replay the configuration's drafters over its texts; print tables, and write them with a picture."""
    bootstrap = bootstrap_of(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    files = [str(each) for each in listed(config, "texts")]
    texts = _texts(files, config.per_category)
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise ValueError(f"tokenizer={config.tokenizer}: there is no tokenizer of that name")

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    encoded = [(each.category, tokens(each.prompt), tokens(each.answer)) for each in texts]
    longest = max(len(prompt) + len(answer) for _, prompt, answer in encoded)
    target = TextTarget(tokenizer, str(config.tokenizer))
    drafters = labelled("drafter", plain(config, "drafters"))
    made = {label: Forced(_built(section), target, longest) for label, section in drafters.items()}
    done: list[Figures] = []
    screen = Console(stderr=True)
    for label, forced in made.items():
        shown = track(encoded, label, console=screen, transient=True, disable=not screen.is_terminal)
        played = [(category, forced.replay(prompt, answer)) for category, prompt, answer in shown]
        counted = [
            Figures(category=name, rounds=len(each.accepted), tokens=each.tokens, nodes=sum(each.nodes))
            for name, each in played
        ]
        done.append(look_up(label, counted, bootstrap))
    report_texts(done, Path(config.out), files=files, tokenizer=target.name, bootstrap=bootstrap)
    return done


def _built(section: DictConfig) -> Drafter:
    return build(OmegaConf.create({"drafter": section}), "drafter")


def _texts(files: list[str], per_category: int | None) -> list[Answered]:
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
