"""What drafters have in common that run a model of their own: a small causal LM, or a head."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from transformers import PreTrainedModel

from drafters.heads.base import FeatureHead
from drafters.heads.bound import DraftHead, fitted, lengthen, row_of
from drafters.heads.eagle import default_layers
from drafters.heads.files import Where
from drafters.reduced import DraftVocabulary, Reduced, with_output
from specdec import DraftSampling, ModelRunner, Target
from specdec.arguments import flag, wholes
from specdec.cache.formats import check_format
from specdec.drafting.builders import TreeBuilder
from specdec.drafting.model_scorer import ModelScorer, RecurrentScorer
from specdec.drafting.scored import ScoredDrafter, ScoredSession
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import Ids
from specdec.drafting.window import FeatureScorer, WindowScorer
from specdec.execution.executor import ModuleCaller
from specdec.interfaces import Description, Sizes
from specdec.quantization import METHODS, check_fast, check_quantization
from specdec.quantization.base import output_width, replace_linears

_Draft = TypeVar("_Draft", bound=DraftHead)


class Drawn(TypedDict, total=False):
    """How drafts are made; ``sampling`` None: as the tree is usually drawn (``TreeBuilder.takes``)."""

    sampling: DraftSampling | str | None
    temperature: float | None
    optimize: bool


class Scored(Drawn, Reduced, total=False):
    """``Drawn``, and the tokens that are drafted."""


class Settings(Scored, total=False):
    """Settings of drafters with a model."""

    attention: str
    kv_cache: str | None


class Options(Settings, total=False):
    """``Settings``, and the name that is shown in error messages."""

    name: str


class HeadOptions(Options, total=False):
    """``Options`` of a head; ``quantization`` is of its weights as it runs, a borrowed output layer included."""

    quantization: str | None
    quantization_check: bool


class Loaded(Where, Settings, total=False):
    """Settings of every head that is loaded from files: where they are (``Where``), and ``Settings``."""

    quantization: str | None
    quantization_check: bool


class LoadedFirst(TypedDict, total=False):
    """Settings of a head that is loaded before its target is known, and runs in the target's dtype and device."""

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
        **vocabulary: Unpack[Reduced],
    ):
        super().__init__(tree, tree.takes[0] if sampling is None else sampling, temperature)
        check_format(kv_cache)
        self.vocabulary = DraftVocabulary(tree.ranks, **vocabulary)
        self.name, self.attention, self.kv_cache = name, attention, kv_cache
        self.optimize = flag("optimize", optimize)

    @classmethod
    def shown(cls, tree: TreeBuilder) -> int:
        """Return the most nodes of a forward of the model, the root not counted: its cache has a place for each."""
        # A model with recurrent layers is shown the last token above the root.
        return 2 * (tree.max_depth + 1) if cls.at_once else 1 + tree.max_shown

    def reduced(self, model: Any, target: Target, ids: torch.Tensor | None = None) -> tuple[Any, Ids | None]:
        """Return a model with the rows of its vocabulary alone, and its tokens, out of ``ids`` (None: all)."""
        output: Any = model.get_output_embeddings()
        if self.vocabulary.size is None or output is None:  # without one, the runner says so
            return model, ids
        ids, _ = self.vocabulary.kept(self.name, output_width(output), ids, target)
        return with_output(model, ids), ids

    def runner_for(self, model: Any, kind: str, sizes: Sizes, *, max_nodes: int, **more: Any) -> ModelRunner:
        """Return a runner of the model, a ``"head"`` or a ``"drafter"``, for one engine; errors name it as such."""
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
                **more,
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
        check_quantization(quantization)
        self.quantization = quantization
        self.quantization_check = flag("quantization_check", quantization_check)

    @classmethod
    def loaded(cls, path: str | Path | None, load: Callable[..., Any], shape: Any, given: Mapping[str, Any]) -> Any:
        """Return a drafter with a head from ``path`` (None: the target's), by ``load``; ``given`` goes to both."""
        options = dict(given)
        options["hidden_layers"] = layers_given(options.get("hidden_layers"))
        taken = {"dtype", "device", *Where.__annotations__, *inspect.signature(load).parameters}
        check_format(options.get("kv_cache"))  # before anything is loaded
        for_load: Any = {key: options.pop(key) for key in taken if options.get(key, ...) is not ...}
        make: Any = cls
        return make(load(path, **for_load), shape, **({} if path is None else {"name": str(path)}), **options)

    def beside(self, head: _Draft, layers: Sequence[int], target: Target, sizes: Sizes) -> _Draft:
        """Return a copy of a head, which reads these hidden states, as it runs beside a target."""
        head = fitted(head, self.name, layers, target).bound(target.model)
        lengthen(head, sizes.max_length)
        if self.vocabulary.size is not None:
            head.reduce(self.vocabulary, self.name, target)
        if self.quantization is not None:
            if self.quantization_check:
                check_fast(head, self.quantization)
            replace_linears(head, METHODS[self.quantization])
        return head


class FeatureDrafter(HeadDrafter):
    """Drafts with a head (None: ``head_for`` loads it) that reads pairs: a state of the target, the token after it."""

    def __init__(
        self,
        head: FeatureHead | None,
        tree: TreeBuilder,
        *,
        hidden_layers: Sequence[int] | None = None,
        **options: Unpack[HeadOptions],
    ):
        options["name"] = options.get("name") or ("" if head is None else type(head).__name__)
        super().__init__(tree, **options)
        self._head, self._layers = head, layers_given(hidden_layers)

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        given = self.head_for(target)
        layers = self.layers_for(given, target)
        head = self.beside(given, layers, target, sizes)
        runner = self.runner_for(head, "head", sizes, max_nodes=self.shown(self.tree))
        fusion = ModuleCaller(head.model.fusion, optimize=self.optimize)
        scorer = self.scorer_of(
            head,
            runner,
            max_batch_size=sizes.max_batch_size,
            window=self.max_depth + 1,
            width=head.feature_width,
            layers=layers,
            fuse=lambda states: fusion(torch.cat(states, dim=-1)),
            to_model=row_of(head, target.vocab_size),
            fuse_version=lambda: fusion.version,
        )
        return ScoredSession(self, scorer, target, sizes, ids=head.draft_ids, hidden_layers=layers)

    @classmethod
    def shown(cls, tree: TreeBuilder) -> int:
        """See ``OwnModelDrafter``; there are as many pairs in a window as a round can add."""
        return super().shown(tree) if cls.at_once else max(tree.max_shown, tree.max_depth + 1)

    def scorer_of(self, head: Any, runner: ModelRunner, **window: Any) -> WindowScorer:
        """Return what scores with a head beside its target; ``window`` are the arguments of ``WindowScorer``."""
        return FeatureScorer(runner, fed_back=head.fed_back, **window)

    def describe(self, target: Target | None = None) -> Description:
        head = self.head if target is None else self.head_for(target)
        found = head.describe()
        layers = found.reads if target is None else tuple(self.layers_for(head, target))
        doubts = {name: layers if name == "layers" else value for name, value in found.doubts.items()}
        return replace(found, reads=layers, at_once=self.at_once, doubts=doubts)

    def head_for(self, target: Target) -> FeatureHead:
        return self.head

    def layers_for(self, head: FeatureHead, target: Target) -> tuple[int, ...]:
        """Return the target's hidden states that a head reads: those given, else its own, else the usual ones."""
        if self._layers is not None:
            return self._layers
        if head.hidden_layers is not None:
            return head.hidden_layers
        assert target.num_layers is not None
        return default_layers(target.num_layers)

    @property
    def head(self) -> FeatureHead:
        assert self._head is not None, "this drafter takes its head from files, when the target is known"
        return self._head


class CausalDrafter(OwnModelDrafter):
    """Drafts with a causal LM, level by level down a tree, over a KV cache of its own."""

    @abstractmethod
    def model_for(self, target: Target) -> PreTrainedModel:
        """Returns the model that drafts for a target. Raises ValueError: none does."""

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        model, ids = self.reduced(self.model_for(target), target, self.shared(target))
        runner = self.runner_for(model, "drafter", sizes, max_nodes=self.shown(self.tree))
        to_model = row_of(model, target.vocab_size)
        scorer = self.scorer_of(runner, max_batch_size=sizes.max_batch_size, to_model=to_model)
        return ScoredSession(self, scorer, target, sizes, ids=ids)

    def shared(self, target: Target) -> Ids | None:
        """Return the tokens that may be drafted (``shared_tokens``); None for all."""
        return None

    def scorer_of(self, runner: ModelRunner, **common: Any) -> Scorer:
        """Return what scores with the model; ``common`` are the arguments of ``ModelScorer``."""
        kind = ModelScorer if runner.cache.states is None else RecurrentScorer
        return kind(runner, **common)
