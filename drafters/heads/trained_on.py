"""The target that a head was trained on, as ``training.json`` names it, and whether it is the one here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from drafters.heads.files import Checkpoint
from specdec import bundled
from specdec.inflate import signal_width
from specdec.target.target import Target

TRAINING = "training.json"
"""The file that the trainer writes beside a head's weights."""

_ROWS = 16
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass(frozen=True)
class TrainedOn:
    """The target of a training.

    Attributes:
        facts: ``facts_of`` it; None where the training did not write them.
    """

    name: str
    facts: Mapping[str, Any] | None = None

    def check(self, head: str, target: Target) -> None:
        """Refuse a target that is another model, for a head of this name. A copy in another dtype is none."""
        path = str(target.model.config.name_or_path or "")
        if any(_place(self.name) == _place(each) for each in (target.name, path)):
            return
        facts = self.facts or _stored_facts(self.name)
        if facts is not None:
            same = _alike(facts, facts_of(target.model))
        else:  # only names are left, and a folder's name often is the repository's
            same = not path or Path(self.name).name == Path(path).name
        if not same:
            raise ValueError(
                f"the head {head} was trained on {self.name}, and the target {target.name} is another model: give a "
                f"head that was trained on this target, or any_target=True"
            )


def trained_on(path: str | Path, **where: Any) -> TrainedOn | None:
    """Returns the target that a head's files name; None if they name none."""
    try:
        stored = Checkpoint(path, **where).json(TRAINING) or {}
    except (ValueError, OSError):  # whatever is wrong with the files, the head's loader says it
        return None
    name, facts = stored.get("target"), stored.get("target_facts")
    return TrainedOn(name, facts if isinstance(facts, Mapping) else None) if isinstance(name, str) and name else None


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """Returns numbers that tell a model from others, in any dtype: its sizes, and some of its embeddings.

    A fine-tuned model has nearly those of the model that it was made of.
    """
    text, width, weights = model.config.get_text_config(decoder=True), signal_width(model), model.get_input_embeddings()
    facts = _facts(model.config, getattr(weights, "weight", None), width)
    return facts if width == text.hidden_size else facts | {"num_hidden_layers": None}  # an inflated one has more


def _stored_facts(name: str) -> dict[str, Any] | None:
    """Returns the facts of a model in a folder on this machine; None if there is none, or it is of an unknown kind."""
    folder = bundled.resolve(name)
    if not (Path(folder) / "config.json").is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(folder)
        tensors = Checkpoint(folder).tensors(lambda key: key.endswith(_EMBEDDINGS))
    except (ValueError, OSError):
        return None
    return _facts(config, next(iter(tensors.values()), None), config.get_text_config(decoder=True).hidden_size)


def _facts(config: PreTrainedConfig, embeddings: Tensor | None, width: int) -> dict[str, Any]:
    text, sample = config.get_text_config(decoder=True), None
    rows: int = text.vocab_size
    if embeddings is not None and not embeddings.is_meta and embeddings.is_floating_point() and len(embeddings) >= rows:
        each = torch.arange(_ROWS, device=embeddings.device)
        sample = embeddings.detach()[each * (rows // _ROWS), (each * 7 + 3) % width].double().tolist()
    layers = getattr(text, "num_hidden_layers", None)
    return {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": rows, "embeddings": sample}


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two models agree in all that is known of both, up to rounding."""
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if None not in (one.get(key), other.get(key)) and one[key] != other[key]:
            return False
    if not one.get("embeddings") or not other.get("embeddings"):
        return True
    first, second = (torch.tensor(each["embeddings"], dtype=torch.float64) for each in (one, other))
    return bool((first - second).norm() <= 0.02 * first.norm())


def _place(name: str) -> str:
    try:
        path = Path(bundled.resolve(name))
    except ValueError:  # a bundled model that is no longer there
        return name
    return str(path.resolve()) if path.is_dir() else name.rstrip("/")
