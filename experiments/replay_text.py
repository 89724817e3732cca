"""Look-ups on texts whose answers are known: ``python -m experiments.replay_text texts=spec_bench.jsonl``.

Drafters that need nothing of a target's model are given every prompt, and then its answer, round by round. What they
draft is compared with the answer, and the answer is what is emitted (*teacher forcing*). So the mean acceptance length
is that of a greedy target that would answer exactly so: any target whose answers are in a file, without its weights.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import launch
from experiments.config.sections import bootstrap_of, check_early, plain
from experiments.config.settings import REPLAY_TEXT

if TYPE_CHECKING:
    from experiments.results.texts import LookUp


def replay_text(config: DictConfig) -> "list[LookUp]":
    """Replay the configuration's drafters over its texts; print tables, and write them with a picture.

    Raises:
        ValueError: There is no such file, a drafter needs the target's model, or no text has an answer.
    """
    if OmegaConf.is_missing(config, "texts"):
        raise ValueError("texts has no value: give texts=FILE, JSON Lines with prompts and answers")
    check_early(config, REPLAY_TEXT)
    from experiments.commands.replay_text import labelled

    sections = labelled(plain(config, "drafters"))
    import torch

    from experiments.commands.replay_text import replay_files

    bootstrap = bootstrap_of(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return replay_files(config, sections, bootstrap)


def main() -> None:
    """Replay drafters over texts."""
    launch(replay_text, "replay_text")


if __name__ == "__main__":
    main()
