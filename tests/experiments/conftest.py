"""Tiny models with a byte tokenizer, saved as users have theirs, and configurations that use them."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafters.heads.eagle_files import save_eagle
from drafters.lora import write_adapter
from experiments.config.launch import Command, with_home
from experiments.config.sections import CONF, TABLES
from experiments.datasets.prompt import Prompt
from experiments.datasets.stdlib import Stdlib
from experiments.measuring.peaks import brief_peaks
from experiments.run import run
from specdec import Target
from tests import components
from tests.gemma4 import assistant
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 257


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END_OF_TEXT: 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``target``, ``drafter`` (mostly of its opinion), ``other`` (of another vocabulary), and heads."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_model(vocab_size=VOCAB_SIZE)
    masks = components.perturbed(target, 0.1)
    masks.config.pard_token = 1
    whole = {"target": target, "pard": masks, "drafter": components.perturbed(target, 0.1)}
    whole["other"] = tiny_model(vocab_size=VOCAB_SIZE + 500)
    for name, model in whole.items():
        model.save_pretrained(folder / name)
    for name in ("target", "drafter"):
        byte_tokenizer().save_pretrained(folder / name)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{index}>" for index in range(500)])
    tokenizer.save_pretrained(folder / "other")
    components.medusa_heads(target).save_pretrained(folder / "medusa")
    write_adapter(folder / "uno", components.noisy_adapter(target, 0.1), base="target")
    components.hydra_heads(target).save_pretrained(folder / "hydra")
    components.block_head(target).save_pretrained(folder / "block")
    save_eagle(components.eagle_head(target), folder / "eagle")
    save_eagle(components.peagle_head(target), folder / "peagle")
    components.recurrent_head(target).save_pretrained(folder / "redrafter")
    assistant().save_pretrained(folder / "assistant")
    components.corpus(target).save(folder / "text.corpus")
    return folder


@pytest.fixture(scope="session")
def target(saved: Path) -> Target:
    return Target.from_pretrained(str(saved / "target"), device="cpu", dtype="float32")


@pytest.fixture(scope="session", autouse=True)
def _once() -> Iterator[None]:
    """Prompts are read and the device's peaks measured once: both would take as long as a tiny run."""
    read = Stdlib.load

    @functools.cache
    def load(prompt_tokens: int) -> list[Prompt]:
        return read(Stdlib(prompt_tokens=prompt_tokens))  # nothing else of it decides which prompts there are

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stdlib, "load", lambda dataset: list(load(dataset.prompt_tokens)))
        patch.setattr("experiments.session.engines.brief_peaks", functools.cache(brief_peaks))
        yield


@pytest.fixture(autouse=True)
def _no_checks_of_shapes() -> Iterator[None]:
    """What runs here below the experiments runs with checks in its own tests."""
    with shapes_unchecked():
        yield


def small(saved: Path, out: Path) -> list[str]:
    """Overrides that make any configuration small and put its output into ``out``."""
    words = [f"target.name={saved / 'target'}", f"out={out}", "dataset.count=3", "dataset.prompt_tokens=16"]
    words += ["sampling.max_new_tokens=12", "warmup_prompts=1", "bootstrap.resamples=100"]
    return [*words, "threads=1"]  # tiny tensors: more threads only wait for each other


@pytest.fixture
def tiny(saved: Path, tmp_path: Path) -> list[str]:
    return small(saved, tmp_path / "out")


@functools.cache
def _composed(name: str, options: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(options))


def composed(name: str, *overrides: str) -> DictConfig:
    """Composes a configuration as the command line does, without Hydra's own section.

    Files are read once for each choice of options; settings are then applied by Hydra itself, to a copy.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    is_option = [
        "@" in word
        or (CONF / each.key_or_group).is_dir()
        or each.key_or_group in TABLES
        or each.key_or_group.startswith("hydra")
        for word, each in zip(overrides, parsed, strict=True)
    ]
    if any(each.is_sweep_override() for each in parsed):
        return _composed(name, overrides)  # raises Hydra's own error
    config = copy.deepcopy(_composed(name, tuple(itertools.compress(overrides, is_option))))
    ConfigLoaderImpl._apply_overrides_to_config([e for e, o in zip(parsed, is_option, strict=True) if not o], config)
    return config


def called(command: Command, *words: str) -> Any:
    given = list(words) if command.rewrite is None else command.rewrite(list(words))
    return command(composed(command.name, *with_home(given)))


@pytest.fixture
def configure() -> Callable[..., DictConfig]:
    return composed


def traced_run(saved: Path, out: Path, *words: str) -> Path:
    """The folder of a tiny run with a trace, without pictures. Nothing may be written there."""
    drafter = [f"drafter.name={saved / 'drafter'}", "method=model", "trace=true", "peaks=none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
        run(composed("run", *small(saved, out), *drafter, *words))
    return out


@pytest.fixture(scope="session")
def traced_out(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_run(saved, tmp_path_factory.mktemp("traced") / "out", "sampling.temperature=1", "drafter.shape=2")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves no pictures, which take most of a tiny run's time. Other tests look at them."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
