"""Makes the bundled models, one training after the other, each by its recipe (conf/options/recipe.yaml).

    python examples/bundle.py                        all of them, into outputs/bundle/bundled
    python examples/bundle.py medusa eagle3 --out FOLDER
    python examples/bundle.py smollm2_eagle3         a head of a model of the hub, which is not among "all"
    python examples/bundle.py target --overrides fit.steps=10 data.count=3

A second call goes on from the trainings in ``--work``. Finished ones get cards and checksums.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from experiments.datasets.stdlib import read_source, training_files
from experiments.results.comparison import commit_of
from experiments.results.origin import read_manifest
from specdec import bundled
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier

END_OF_TEXT = "<|endoftext|>"
# Words, numbers and punctuation with the space before them; a line break takes the next line's indentation along.
_PIECES = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|[ \t]+(?=[ \t])|\s+")

CARD, FACTS, BEST = "MODEL_CARD.md", "training.json", "best"
TARGET, HYBRID = "target", "hybrid"
OTHERS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Targets that do not ship, by the first word of their heads' names. Their licence (Apache-2.0) is the heads', too."""
_BEGIN, _END = "<!-- heads:begin -->", "<!-- heads:end -->"
_OWN = ("out=", "threads=", "resume=", "states=", "data.file=", "regenerate.file=", "target.name=", "hydra.", "tracker")
"""Overrides that do not change what is trained."""
_RECIPE = ("head", "loss", "weights", "data", "regenerate", "fit", "served", "seed", "mixed_precision")
_TRIED = "import os\n\n\ndef read_lines(path):\n"
KINDS: dict[str, tuple[str, Any]] = {
    "TrainedLM": ("causal LM", ModelDrafter),
    "TrainedEagle3": ("EAGLE-3 head", EagleDrafter),
    "TrainedBlock": ("block drafter's head", BlockDrafter),
    "TrainedMedusa": ("Medusa heads", MedusaDrafter),
    "TrainedHydra": ("Hydra heads", HydraDrafter),
    "TrainedMTP": ("MTP module", MTPDrafter),
}
"""The heads that can be bundled, by the class that trained it: in words, and its drafter."""


def make_blank(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write a blank target: it has a vocabulary and positions, and its few weights are random.

    A language model that is trained for it with ``loss=cross_entropy`` (``recipe=bundled_target``) learns from the
    text, and nothing from the blank.

    Args:
        folder: Takes the model and the tokenizer, a byte-level BPE.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_source(path) for path in training_files()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"bos_token_id": None, "eos_token_id": fast.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(fast), max_position_embeddings=max_length, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def install(name: str, training: Path, out: Path) -> None:
    """Copy the best weights of a training into the folder of bundled models, and write card, list and checksums.

    Nothing is copied unless the head loads, drafts in the engine without changing a greedy output, and all files
    together stay below ``bundled.MOST_BYTES``.

    Args:
        name: The name that it gets; see ``target_for``.
        training: The folder of a training (``experiments.train``).

    Raises:
        ValueError: The folder holds no such training, or a head that does not work, or the files are too large.
    """
    facts = _facts(name, training, out)
    kept = sum(path.stat().st_size for path in bundled.files(out) if path.parent.name != name)
    total = kept + sum(path.stat().st_size for path in (training / BEST).iterdir())
    if total > bundled.MOST_BYTES:
        raise ValueError(
            f"all bundled models would have {total / 1e6:.1f} MB, more than {bundled.MOST_BYTES / 1e6:.0f}: "
            f"leave {name} out, or train a smaller one"
        )
    said = ""
    if target_for(name) is not None:
        said = f"{_tried(name, training / BEST, facts, out):.2f} tokens per round on one prompt; "
    place = out / name
    for path in place.glob("*"):  # nothing of an earlier head may stay but what it was asked
        if path.suffix != ".parquet":
            path.unlink()
    shutil.copytree(training / BEST, place, dirs_exist_ok=True)
    for path in place.iterdir():
        path.chmod(0o644)
    (place / CARD).write_text(card(name, facts, read_manifest(training)), encoding="utf-8")
    _list_heads(out)
    (out / bundled.SUMS).write_text(bundled.checksums(out), encoding="utf-8")
    print(
        f"{name}: {said}installed in {place}; all: {total / 1e6:.1f} MB of {bundled.MOST_BYTES / 1e6:.0f}", flush=True
    )


def target_for(name: str) -> str | None:
    """The target of a bundled model: drafters of the hybrid and of ``OTHERS`` say it in front; None for targets."""
    if name in (TARGET, HYBRID):
        return None
    first = name.partition("_")[0]
    return OTHERS.get(first) or bundled.PREFIX + (HYBRID if first == HYBRID else TARGET)


def card(name: str, facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The card of a bundled model, in Markdown.

    Args:
        facts: ``training.json`` beside its weights.
    """
    config, versions = manifest["config"], manifest["versions"]
    given = " ".join(text for text in manifest["overrides"] if not text.startswith(_OWN))
    recipe = yaml.safe_dump(_portable({key: config[key] for key in _RECIPE if key in config}), sort_keys=False)
    target = target_for(name)
    whose = "" if target is None else f" for {target}"
    other = target in OTHERS.values()
    asked = "the target's own answers to [questions](prompts.parquet), most of which it asked itself"
    source = asked if other else f"see [the target's card](../{CARD})"
    by = "expected" if "expected_length" in facts["figures"] else "served"
    chosen = f", which had the greatest {by} length" if facts["figures"].get("served_length") else ""
    rows = [
        ("what", f"{KINDS[facts['head']][0]}{whose}, {facts['parameters']:,} parameters, bfloat16"),
        ("data", f"{facts['tokens']:,} tokens in {facts['documents']:,} documents, {source}"),
        ("weights of", f"step {facts['step']} of {config['fit']['steps']}{chosen}"),
        *_figures(facts["figures"]),
        ("made by", f"`python -m experiments.train {given}`, commit {commit_of(manifest)}, torch {versions['torch']}"),
    ]
    if other:
        rows.append(("licence", "Apache-2.0, as its target's"))
    table = "\n".join(f"| {left} | {right} |" for left, right in rows)
    use = f"Drafts{whose}" if other else "For demonstrations and tests of speculative decoding with the bundled models"
    return f"""# Model card: bundled/{name}

{use}, and for nothing else.

| | |
|---|---|
{table}

*Served length* is the mean acceptance length of chains in the engine, on held-out prompts. *Accuracy* is how often the
most probable token is the target's, by depth, when the tokens before it are given.

```yaml
{recipe}```
"""


def _portable(value: Any) -> Any:
    """Settings without the folders of the machine that they were used on."""
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _figures(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    at = "served_length/T="
    served = [(name.removeprefix(at), value) for name, value in figures.items() if name.startswith(at)]
    served = [(temperature, value) for temperature, value in served if "/" not in temperature]  # not their intervals
    depths = {int(name.rpartition("/")[2]): value for name, value in figures.items() if "held_out/accuracy/" in name}
    rows = [("served length", ", ".join(f"{value:.2f} at T={temperature}" for temperature, value in served))]
    if depths:
        rows.append(("held-out accuracy", ", ".join(f"{depths[depth]:.0%}" for depth in sorted(depths))))
    return [row for row in rows if row[1]]


def _facts(name: str, training: Path, out: Path) -> dict[str, Any]:
    """The facts that a training has written beside its best weights."""
    path = training / BEST / FACTS
    if not path.is_file():
        raise ValueError(f"{name}: there is no {BEST}/{FACTS} in {training}, give the folder of a training")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if facts["head"] not in KINDS:
        raise ValueError(f"{name}: {training} holds a {facts['head']}, give one of {', '.join(KINDS)}")
    target = target_for(name)
    if target is not None and facts["target"] not in (target, str(out / target.removeprefix(bundled.PREFIX))):
        raise ValueError(f"{name}: {training} was trained for {facts['target']}, give a head for {target}")
    return facts


def _tried(name: str, folder: Path, facts: Mapping[str, Any], out: Path) -> float:
    """The tokens per round of a head on one prompt."""
    transformers_logging.disable_progress_bar()
    whose = target_for(name) or bundled.PREFIX + name
    own = out / whose.removeprefix(bundled.PREFIX)
    where = str(own) if (own / "config.json").is_file() else whose
    target = Target.from_pretrained(where, dtype="float32", device="cpu")
    drafter: Drafter = KINDS[facts["head"]][1].from_pretrained(str(folder))
    sampling = SamplingParams(max_new_tokens=32, ignore_eos=True)
    with Engine(target, drafter, RejectionVerifier(), max_length=128) as engine:
        (plain,) = engine.generate([_TRIED], sampling, speculate=False)
        (done,) = engine.generate([_TRIED], sampling)
    if done.token_ids != plain.token_ids:
        raise ValueError(f"{name}: {folder.parent} changes greedy outputs, it must not be bundled")
    return len(done.token_ids) / len(done.steps)


def _list_heads(out: Path) -> None:
    """Bring the list of models in the card of all up to date."""
    path = out / CARD
    rows = []
    for each in sorted(out.glob(f"*/{CARD}")):
        facts = json.loads((each.parent / FACTS).read_text(encoding="utf-8"))
        what = f"{KINDS[facts['head']][0]}, {facts['parameters']:,} parameters"
        rows.append(f"| `{bundled.PREFIX}{each.parent.name}` | {what} | [card]({each.parent.name}/{CARD}) |")
    trained = "Trained with `python -m experiments.train`; their own cards have recipe and figures."
    section = "\n".join([_BEGIN, "## Heads", "", trained, "", "| name | is | |", "|---|---|---|", *rows, _END])
    text = path.read_text(encoding="utf-8") if path.is_file() else "# Model card: the bundled models\n"
    before, found, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if found else "\n"
    path.write_text(f"{before.rstrip()}\n\n{section}{after}", encoding="utf-8")


MODELS = ("target", "drafter", "medusa", "hydra", "eagle3", "dspark", "hybrid", "hybrid_eagle3")


def train(name: str, out: Path, work: Path, sizes: tuple[int, int], overrides: Sequence[str], threads: int = 1) -> None:
    """Train a bundled model by its recipe, in a process of its own, and install it.

    Args:
        sizes: The tokens of the target's tokenizer, which is trained first, and its positions.
    """
    blank = work / "blank"
    if name == TARGET and not (blank / "tokenizer.json").is_file():
        make_blank(blank, *sizes)
    if not (work / name / "last").is_dir():
        whose = target_for(name)
        own = out / (whose or TARGET).removeprefix(bundled.PREFIX)
        target = blank if name == TARGET else own
        recipe = name if whose in OTHERS.values() else f"bundled_{name}"
        words = [f"recipe={recipe}", f"out={work / name}", f"threads={threads}"]
        words += [f"target.name={target}"] if (target / "config.json").is_file() else []
        words += [f"regenerate.file={work / 'responses.jsonl'}"] if own == out / TARGET and whose else []
        if own == out / HYBRID and (kin := out / name.removeprefix(f"{HYBRID}_") / "config.json").is_file():
            words.append(f"head.name={kin.parent}")  # its recipe goes on from the target's drafter of this kind
        words += [*overrides, *(["resume=true"] if (work / name / "manifest.json").is_file() else [])]
        command = [sys.executable, "-m", "experiments.train", *words, f"hydra.run.dir={work / name}"]
        print(shlex.join(["python", *command[1:]]), flush=True)
        if subprocess.run(command).returncode:
            raise ValueError(f"the training of {name} ended early: see above; the same command goes on with it")
    install(name, work / name, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("outputs/bundle/bundled"))
    parser.add_argument("--work", type=Path, default=Path("outputs/bundle"))
    parser.add_argument("--overrides", nargs="*", default=[])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for model in given.models:
        train(model, given.out, given.work, (4096, 1024), given.overrides)
