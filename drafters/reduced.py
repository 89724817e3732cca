"""A reduced draft vocabulary: the most frequent tokens, whose rows alone a drafter's output layer keeps.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856). q is zero for all other tokens, which the residual covers: outputs stay
exact. Embeddings keep all rows, because any token may be read.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypedDict

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import Target
from specdec.arguments import whole
from specdec.drafting.vocabulary import Ids
from specdec.quantization.base import QuantizedLinear, is_packed

_PIECE = 4000  # characters that are tokenized together


class Reduced(TypedDict, total=False):
    """The settings of a ``DraftVocabulary``, as drafters take them."""

    vocabulary: int | None
    vocabulary_corpus: Any  # a text file, or several; None for none


class DraftVocabulary:
    """The number of tokens that a drafter keeps (``size``; None: all), the most frequent ones of some text files.

    Args:
        vocabulary: The number.
        vocabulary_corpus: A text file or several, whose tokens are counted; None for the reference texts that come with
            Python. Of equals the lower id counts as more frequent: tokenizers give low ids to what they merge first.
        ranks: The most children of a node, so many tokens there must be.
    """

    def __init__(self, ranks: int, vocabulary: int | None = None, vocabulary_corpus: Any = None):
        few = f"give at least {ranks}, the most children of a node"
        self.size = None if vocabulary is None else whole("vocabulary", vocabulary, least=ranks, few=few)
        named = [vocabulary_corpus] if isinstance(vocabulary_corpus, str | Path) else vocabulary_corpus or ()
        self.files = [Path(file).expanduser() for file in named]
        if self.files and self.size is None:
            raise ValueError("vocabulary_corpus chooses the tokens of a vocabulary: give its size, vocabulary=16384")
        if missing := [file for file in self.files if not file.is_file()]:
            raise ValueError(f"vocabulary_corpus={missing[0]}: there is no such file: give text files")

    def kept(self, name: str, columns: int, own: Ids | None, target: Target) -> tuple[Tensor, Tensor]:
        """Return the tokens that are kept of a drafter's ``own`` (None: column i's is i), and their places among these.

        Both ascend; ends are kept first. Raises ValueError: there are fewer, or there is a corpus and no tokenizer.
        """
        among = torch.arange(min(columns, target.vocab_size)) if own is None else own.cpu()
        if self.size is None or self.size > len(among):
            raise ValueError(f"vocabulary={self.size}: the drafter {name} has {len(among)} tokens: give fewer, or null")
        counts = self._counts(target)
        ends = {*target.eos_token_ids, *getattr(target.tokenizer, "all_special_ids", ())}
        counts[torch.tensor([end for end in ends if end < len(counts)], dtype=torch.long)] = counts.max() + 1
        places = counts[among].sort(descending=True, stable=True).indices[: self.size].sort().values
        return among[places].to(target.device), places.to(target.device)

    def _counts(self, target: Target) -> Int[Tensor, " vocab"]:
        if (tokenizer := target.tokenizer) is None:
            if self.files:
                raise ValueError(f"vocabulary_corpus: the target {target.name} has no tokenizer to count tokens with")
            return torch.zeros(target.vocab_size, dtype=torch.long)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in self.files] or [*topics.values()]
        pieces = [text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)]
        rows = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] if pieces else []
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.long)
        return tokens.bincount(minlength=target.vocab_size)[: target.vocab_size]


def twin_of(module: nn.Module, changed: Mapping[int, Tensor] | None = None) -> Any:
    """Return a module with modules of its own and the very same tensors, but for those ``changed``, by their ``id``."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, tensors | dict(changed or {}))


def cut(module: nn.Module, rows: Ids, layers: Sequence[nn.Module] = ()) -> Any:
    """Return a twin of a module in which some output layers of it (itself) have some rows alone, in their format."""
    changed = dict[int, Tensor]()
    for part in (part for layer in layers or [module] for part in layer.modules()):
        if not isinstance(part, QuantizedLinear) and is_packed(part):
            raise ValueError(f"vocabulary: another library packed the {type(part).__name__}: give null")
        named = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for tensor in (getattr(part, name) for name, _ in named):  # read so, quantized numbers are in their own order
            some = tensor.detach()[rows.to(tensor.device)]
            changed[id(tensor)] = nn.Parameter(some, False) if isinstance(tensor, nn.Parameter) else some
    twin = twin_of(module, changed)
    for part in twin.modules():
        if isinstance(part, nn.Linear | QuantizedLinear):
            part.out_features = len(part.weight)
    return twin


def with_parts(module: nn.Module, **parts: nn.Module | None) -> Any:
    """Return a module with others in the places of some parts; all else is its own."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = {**module._modules, **parts}
    return twin


def with_output(model: PreTrainedModel, rows: Ids) -> Any:
    """Return a model whose output layer has some rows alone. Its embeddings, tied to it or not, keep all."""
    output = model.get_output_embeddings()
    name = next((name for name, module in model.named_children() if module is output), None)
    if name is None or output is None:
        raise ValueError(f"vocabulary: the output layer of a {model.config.model_type} is not by itself: give null")
    return with_parts(model, **{name: cut(output, rows)})
