"""Drafters whose heads read the target's newest last state and have no cache, Medusa and Hydra: their common part."""

import copy
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.assemble import loader
from drafters.heads.bound import beside, rows_of, widened
from drafters.heads.files import Checkpoint, Where
from drafters.heads.training import Borrowed, TrainedHead, frozen_copy, output_of
from drafters.own_model import OwnModelDrafter, Scored
from drafters.reduced import DraftVocabulary, cut
from specdec import Batch, DraftSampling, Outcome, Target, Topology, TreeShape
from specdec.arguments import instance, whole
from specdec.drafting.builders import AnyTree, StaticTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.scorer import Scorer
from specdec.execution.executor import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Description, Drafter, Sizes
from specdec.target.loading import resolve_dtype

_SHALLOW = [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0)]
DEFAULT_SHAPE = TreeShape.from_paths(
    [*_SHALLOW, (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)]
)
"""13 nodes, four deep: most children are below likely paths (section 2.3.3 of Medusa's paper)."""


class Heads(nn.Module):
    """One head for every depth of a draft. A subclass makes their layers, and loads them from a public layout.

    They look ``num_heads`` tokens ahead beyond the target's own, in ``num_layers`` layers each; a ``vocab_size`` of 0
    borrows the target's output layer.

    Attributes:
        files: Names that their file of weights may have, which needs no ``config.json``; none for a model's usual.
        draft_ids: The target's id of every column, ascending; None if column i is id i.
    """

    files: ClassVar[tuple[str, ...]] = ()
    least_layers: ClassVar[int] = 1
    least_columns: ClassVar[int] = 1
    sizes: ClassVar[tuple[str, ...]] = ("num_heads", "vocab_size", "num_layers", "base_model")
    draft_ids: Int[Tensor, " column"] | None

    def __init__(self, *, num_heads: int, hidden_size: int, vocab_size: int, num_layers: int = 1, base_model: str = ""):
        super().__init__()
        self.register_buffer("draft_ids", None, persistent=False)
        self.num_heads = whole("num_heads", num_heads, least=1)
        self.hidden_size = whole("hidden_size", hidden_size, least=1)
        self.vocab_size = whole("vocab_size", vocab_size, least=self.least_columns)
        self.num_layers, self.base_model = whole("num_layers", num_layers, least=self.least_layers), base_model

    @property
    def max_depth(self) -> int | None:
        """The deepest node whose children they score; None for any depth."""
        return self.num_heads

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: Checkpoint) -> "Heads":
        """The heads of a checkpoint, in its own dtype."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write the heads in their public layout."""

    @abstractmethod
    def output(self, depth: int) -> Any:
        """The output layer of a depth, from 1."""

    @abstractmethod
    def begin_as(self, output: nn.Linear) -> None:
        """Set all weights so that every head says what an output layer does of the hidden state alone."""

    def describe(self) -> Description:
        tokens = None if self.draft_ids is None else self.draft_ids.tolist()
        return Description(kind=type(self).__name__, parts=(self,), reads=(-1,), tokens=tokens)

    def completed(self, output: nn.Linear) -> Any:
        """The same heads with the target's output layer, if they borrow it."""
        return self

    def reduced(self, vocabulary: DraftVocabulary, target: Target) -> Any:
        """The same heads with some tokens of their own, and a copy of the output layers' rows for them."""
        ids, rows = vocabulary.kept(type(self).__name__, self.vocab_size, self.draft_ids, target)
        twin = cut(self, rows, [self.output(depth) for depth in range(1, 1 + self.num_heads)])
        twin.vocab_size, twin.draft_ids = len(ids), ids
        return twin

    def like(self, **changed: Any) -> Any:
        """New heads of the same sizes, but for some."""
        twin = type(self)(**{name: getattr(self, name) for name in self.sizes} | changed)
        twin.draft_ids = self.draft_ids
        return twin

    def parts(self, name: str) -> tuple[int, int]:
        """See ``bound.widened``."""
        return 1, 0

    def widened(self, hidden_size: int) -> "Heads":
        """The same heads for wider hidden states, of which only the first channels carry signal."""
        return widened(self, self.like(hidden_size=hidden_size), hidden_size / self.hidden_size, self.parts)

    @classmethod
    def from_pretrained(cls, path: str | Path, **given: Any) -> Any:
        """Load heads from a folder, the hub, ``bundled/…``, or a file of weights; see ``loader``."""
        return loader(cls.read, cls.files)(path, **given)


class LastStateScorer(Scorer):
    """Scores with heads that read the target's last state at every slot's last committed position (``newest``)."""

    needs_state = True
    lookback = 1  # the newest state is kept
    newest: Float[Tensor, "slot hidden"]

    def __init__(self, heads: ModuleCaller, *, max_batch_size: int, dtype: torch.dtype, device: torch.device):
        module: Any = heads.module
        self.heads, self.model, self.vocab_size = heads, module, module.vocab_size
        self.max_depth = module.max_depth
        with torch.inference_mode(False):
            self.newest = torch.zeros(max_batch_size, module.hidden_size, dtype=dtype, device=device)

    def prepare(self, batch: Batch) -> Hashable:
        return self.heads.version

    def states(self, outcome: Outcome) -> Float[Tensor, "batch position hidden"]:
        """Return what the heads read of committed positions: the target's last states."""
        return outcome.hidden_states[-1]

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Keep the state at every row's last committed position."""
        hidden, slots, counts = self.states(outcome), outcome.slots, outcome.counts
        last = (counts - 1).clamp_(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        chosen = hidden.gather(1, last)[:, 0].to(self.newest.dtype)
        self.newest[slots] = chosen.where((counts > 0)[:, None], self.newest[slots])


class PathScorer(LastStateScorer):
    """Scores a node's children by what is known of its path: ``width`` numbers, made of its parent's and its token."""

    cheap_levels = True

    def __init__(self, *, embed: Any, max_shown: int, width: int, **places: Any):
        super().__init__(**places)
        self._embed, self._nodes, self._width = embed, 1 + max_shown, width

    @abstractmethod
    def step(self, hidden: Tensor, embeds: Tensor, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the logits of nodes' children and what is known of their paths, by each row's state and ``above``."""

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        self._known = self.newest.new_zeros(len(batch), self._nodes, self._width)
        return self._scored(batch, batch.roots[:, None], slice(0, 1), self._known[:, :1], 0)

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Tensor:
        nodes = slice(topology.width - tokens.shape[1], topology.width)
        parents = topology.parents[:, nodes].expand(len(batch), -1)
        above = self._known.gather(1, parents[:, :, None].expand(-1, -1, self._width))
        return self._scored(batch, tokens, nodes, above, depth)

    def _scored(self, batch: Batch, tokens: Tensor, nodes: slice, above: Tensor, depth: int) -> Tensor:
        embeds = self._embed(tokens).to(self.newest.dtype)
        logits, self._known[:, nodes] = self.step(self.newest[batch.slots][:, None], embeds, above, depth)
        return logits


class LoadedHeads(Scored, Where, total=False):
    """``Scored``, where the heads' files are, and what they compute in."""

    dtype: str | torch.dtype | None


class LastStateDrafter(OwnModelDrafter):
    """Drafts with a head for every depth, from the target's hidden state at the last committed position.

    A row proposes nothing in the first round after a prompt of one token, where no token is committed yet.

    Args:
        heads: The trained heads, which ``bind`` does not change.
        shape: A tree builder, or what ``TreeShape.of`` takes. None is ``usual_tree``: ``DEFAULT_SHAPE``, as deep as
            there are heads.
        dtype: What the heads compute in; None for the target's own.
        optimize: On a CPU, run the heads on packed weights (``specdec.execution``).
    """

    runs = "head"
    kind: ClassVar[type[Heads]]
    title: ClassVar[str]

    def __init__(
        self,
        heads: Any,
        shape: AnyTree | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        **options: Unpack[Scored],
    ):
        name = type(self).__name__
        instance("heads", heads, self.kind, f"{self.kind.__name__}, or load them with {name}.from_pretrained(…)")
        self.heads = heads  # `bind` copies them if they must change, and calls them in evaluation mode
        given: Any = {"sampling": DraftSampling.DETERMINISTIC, "name": self.title, **options}
        super().__init__(tree_of(self.usual_tree(heads) if shape is None else shape), **given)
        self.shape = self.tree.shape if isinstance(self.tree, StaticTree) else None
        most = heads.max_depth
        if most is not None and self.max_depth > most:
            raise ValueError(
                f"the tree shape is {self.max_depth} deep and there are {most} {self.title} heads: "
                f"give a shape that is no deeper than the heads are many"
            )
        columns = heads.vocab_size
        if self.shape is not None and columns and max(self.shape.ranks) >= columns:
            raise ValueError(
                f"the tree shape takes the {max(self.shape.ranks) + 1} most probable tokens of a vocabulary of "
                f"{columns}: give a narrower shape"
            )
        resolved = "auto" if dtype is None else resolve_dtype(dtype)
        self.dtype = resolved if isinstance(resolved, torch.dtype) else None
        # A leaf takes one more.
        self.has_leaf_probs = self.tree.has_leaf_probs and (most is None or self.max_depth < most)

    @classmethod
    def usual_tree(cls, heads: Any) -> AnyTree:
        return DEFAULT_SHAPE.cut(heads.num_heads)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[LoadedHeads],
    ) -> Any:
        """Load heads with ``Heads.from_pretrained``."""
        given: Any = dict(options)
        where = {key: given.pop(key) for key in Where.__annotations__ if key in given}
        return cls(cls.kind.from_pretrained(path, device=device, **where), shape, **given)

    def describe(self, target: Target | None = None) -> Description:
        return replace(self.heads.describe(), kind=f"{self.title} heads", at_once=self.at_once)

    @abstractmethod
    def scorer(self, heads: Any, target: Target, sizes: Sizes) -> LastStateScorer:
        """Return the scorer, with heads that are as wide as the target."""

    def placed(self, heads: Heads, target: Target, sizes: Sizes) -> dict[str, Any]:
        dtype = self.dtype or target.dtype
        caller = ModuleCaller(beside(heads, target.device, dtype), optimize=self.optimize)
        return {"heads": caller, "max_batch_size": sizes.max_batch_size, "dtype": dtype, "device": target.device}

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        output = target.model.get_output_embeddings()
        assert output is not None, "the engine refuses models without an output layer"
        width, heads = getattr(output, "in_features", None) or output.weight.shape[1], self.heads
        if heads.hidden_size == signal_width(target.model) < width:
            heads = heads.widened(width)  # the target is inflated, and its heads cost what such a target's would
        if heads.hidden_size != width:
            raise ValueError(
                f"the {self.title} heads read hidden states of width {heads.hidden_size} and those of the target "
                f"{target.name} have {width}: give heads that were trained on this target"
            )
        heads, ids = heads.completed(output_of(target.model)), heads.draft_ids
        tokens = heads.vocab_size if ids is None else 1 + int(ids[-1])
        if tokens > target.vocab_size:
            raise ValueError(
                f"the {self.title} heads have {tokens} tokens and the target {target.name} has "
                f"{target.vocab_size}: give heads that were trained on this target"
            )
        if self.vocabulary.size is not None:
            heads = heads.reduced(self.vocabulary, target)
        scorer = self.scorer(heads, target, sizes)
        return ScoredSession(self, scorer, target, sizes, ids=heads.draft_ids, hidden_layers=(-1,))


class TrainedHeads(TrainedHead):
    """Heads of the last state, before the root. New ones begin as the target's own output layer.

    Args:
        name: Heads to go on from, a folder or a name on the hub; None for new ones.
    """

    made: ClassVar[type[LastStateDrafter]]
    head: Any

    def __init__(self, *, name: str | None = None, depths: int = 4, num_layers: int = 1):
        super().__init__(depths)
        self.name, self.num_layers = name, num_layers

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        self._embed = (Borrowed(target.model.get_input_embeddings()),)  # in a tuple, so that it is not registered
        output, kind = output_of(target.model), self.made.kind
        vocab_size, hidden_size = rows_of(output).shape
        if self.name is None:
            self.head = kind(
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                num_layers=self.num_layers,
                base_model=target.name,
                **self.settings(target),
            )
            with torch.no_grad():
                self.head.begin_as(output)
            return
        self.head = copy.deepcopy(kind.from_pretrained(self.name).completed(output)).float()
        found = (self.head.max_depth or self.depths, self.head.hidden_size, self.head.vocab_size)
        if found != (self.depths, hidden_size, vocab_size):
            raise ValueError(
                f"head.name={self.name!r} holds {found[0]} heads of width {found[1]} with {found[2]} tokens, and "
                f"{self.depths} of width {hidden_size} with {vocab_size} are wanted for the target {target.name}"
            )

    def logits(self, states: Tensor, previous: Int[Tensor, " place"], depth: int) -> Float[Tensor, "place column"]:
        return self.head.output(depth)(states).float()

    def settings(self, target: Target) -> dict[str, Any]:
        """Further arguments of new heads."""
        return {"num_heads": self.depths}

    def drafter(self) -> Drafter:
        return self.made(frozen_copy(self.head), self.depths, sampling="iid", optimize=False)
