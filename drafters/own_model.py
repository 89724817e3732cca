"""What drafters have in common that run a model of their own: a small causal LM, or a head."""

import copy
import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.heads.bound import DraftHead, fitted, lengthen
from drafters.heads.files import Where
from specdec.arguments import flag, wholes
from specdec.cache.formats import check_format
from specdec.drafting.builders import ExpansionTree, TreeBuilder
from specdec.drafting.model_scorer import ModelScorer, RecurrentScorer
from specdec.drafting.scored import ScoredDrafter, ScoredSession
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.interfaces import Sizes
from specdec.quantization import METHODS, check_fast, check_quantization
from specdec.quantization.base import replace_linears
from specdec.target.adapters import Adapters
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.types import DraftSampling

_Draft = TypeVar("_Draft", bound=DraftHead)


class Settings(TypedDict, total=False):
    """Settings of every drafter with a model of its own.

    Attributes:
        sampling: See ``ScoredDrafter``; None for ``"deterministic"`` with a tree of the most probable paths, and
            ``"iid"`` otherwise.
        kv_cache: See ``ModelRunner``; for the model's keys and values. It may differ from the target's.
    """

    sampling: DraftSampling | str | None
    temperature: float | None
    attention: str
    optimize: bool
    kv_cache: str | None


class Options(Settings, total=False):
    """``Settings``, and the name that is shown in error messages."""

    name: str


class HeadOptions(Options, total=False):
    """``Options`` of a head.

    Attributes:
        quantization: The weights of the head as it runs (``specdec.quantization``), an output layer that it borrows
            included; None for the target's dtype.
        quantization_check: Refuse a scheme that is not faster than the target's dtype on its device.
    """

    quantization: str | None
    quantization_check: bool


class Loaded(Where, Settings, total=False):
    """Settings of every head that is loaded from files: where they are (``Where``), and ``Settings``."""

    quantization: str | None
    quantization_check: bool


class LoadedFirst(Loaded, total=False):
    """``Loaded``, of a head that is loaded before its target is known.

    Attributes:
        dtype: What to load it in; None for the checkpoint's own. It runs in the target's.
        device: Where to load it; None for the CPU, from where it is copied to the target's device.
    """

    dtype: str | torch.dtype | None
    device: str | torch.device | None
    hidden_layers: Sequence[int] | None


def layers_given(hidden_layers: object) -> tuple[int, ...] | None:
    """Returns the hidden states that a user asked for; None if none were. Raises ValueError: they are no numbers."""
    remedy = "give the numbers of hidden states, such as [2, 16, 29]"
    return None if hidden_layers is None else wholes("hidden_layers", hidden_layers, remedy)


class OwnModelDrafter(ScoredDrafter):
    """Drafts with a model of its own. In its ``bind``, a subclass calls ``runner_for``."""

    def __init__(
        self,
        tree: TreeBuilder,
        *,
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        name: str = "",
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
    ):
        if sampling is None:
            sampling = DraftSampling.DETERMINISTIC if isinstance(tree, ExpansionTree) else DraftSampling.IID
        super().__init__(tree, sampling, temperature)
        check_format(kv_cache)
        self.name, self.attention, self.kv_cache = name, attention, kv_cache
        self.optimize = flag("optimize", optimize)

    @classmethod
    def shown(cls, tree: TreeBuilder) -> int:
        """Return the most nodes of a forward of the model, the root not counted: its cache has a place for each."""
        # A model with recurrent layers is shown the last token above the root.
        return 2 * (tree.max_depth + 1) if cls.at_once else 1 + tree.max_shown

    def runner_for(
        self, model: PreTrainedModel, kind: str, sizes: Sizes, *, max_nodes: int, adapters: Adapters | None = None
    ) -> ModelRunner:
        """Return a runner of the model, a ``"head"`` or a ``"drafter"``, for one engine.

        Raises:
            ValueError: The model cannot be run. Names the drafter, because it would read as if the target were meant.
        """
        try:
            return ModelRunner(
                model,
                max_batch_size=sizes.max_batch_size,
                max_length=sizes.max_length,
                max_nodes=max_nodes,
                attention=self.attention,
                optimize=self.optimize,
                kv_cache=self.kv_cache,
                paging=sizes.paging,
                adapters=adapters,
            )
        except ValueError as error:
            raise ValueError(f"the {kind} {self.name}: {error}") from error


class HeadDrafter(OwnModelDrafter):
    """Drafts with a head beside the target."""

    runs = "head"

    def __init__(
        self,
        tree: TreeBuilder,
        *,
        quantization: str | None = None,
        quantization_check: bool = True,
        **options: Unpack[Options],
    ):
        super().__init__(tree, **options)
        if quantization is not None:
            check_quantization(quantization)
        self.quantization = quantization
        self.quantization_check = flag("quantization_check", quantization_check)

    @classmethod
    def loaded(cls, path: str | Path | None, load: Callable[..., Any], shape: Any, given: Mapping[str, Any]) -> Any:
        """Return a drafter with a head from files.

        Args:
            path: The files' place; None for those of the target.
            load: Loads the head; given ``path``, and what there is of ``Where`` and of its own parameters.
            given: ``Loaded``, and other arguments of ``load`` and of the drafter.
        """
        options = dict(given)
        options["hidden_layers"] = layers_given(options.get("hidden_layers"))
        taken = {"dtype", "device", *Where.__annotations__, *inspect.signature(load).parameters}
        check_format(options.get("kv_cache"))  # before anything is loaded
        for_load: Any = {key: options.pop(key) for key in taken if options.get(key, ...) is not ...}
        make: Any = cls
        return make(load(path, **for_load), shape, **({} if path is None else {"name": str(path)}), **options)

    def beside(self, head: _Draft, layers: Sequence[int], target: Target, sizes: Sizes) -> _Draft:
        """Return a copy of a head, which reads these hidden states, as it runs beside a target.

        Raises:
            ValueError: It does not fit the target, or its quantization is not faster here.
        """
        head = fitted(head, self.name, layers, target).bound(target.model)
        lengthen(head, sizes.max_length)
        if self.quantization is not None:
            if self.quantization_check:
                check_fast(head, self.quantization)
            replace_linears(head, METHODS[self.quantization])
        return head


class CausalDrafter(OwnModelDrafter):
    """Drafts with a causal LM, level by level down a tree.

    Each level takes one forward over all rows and all nodes that are to have children. The model has its own KV cache,
    which follows the accepted path like the target's.
    """

    @abstractmethod
    def model_for(self, target: Target) -> PreTrainedModel:
        """Returns the model that drafts for a target. Raises ValueError: none does."""

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        runner = self.runner_for(self.model_for(target), "drafter", sizes, max_nodes=self.shown(self.tree))
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size)
        scorer = self.scorer_of(runner, max_batch_size=sizes.max_batch_size, to_model=vocabulary.to_drafter)
        return ScoredSession(self, scorer, vocabulary, target.device, sizes)

    def scorer_of(self, runner: ModelRunner, **common: Any) -> Scorer:
        """Return what scores with the model; ``common`` are the arguments of ``ModelScorer``."""
        kind = ModelScorer if runner.cache.states is None else RecurrentScorer
        return kind(runner, **common)


def twin_of(model: PreTrainedModel) -> Any:
    """Returns a model with modules of its own and the very same tensors."""
    tensors: Iterable[Tensor] = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
