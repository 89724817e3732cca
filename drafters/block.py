"""Block drafters: a small transformer fills all places of a block in one forward.

DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), and trees over what their places say (DDTree, arXiv 2604.12989).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from drafters.heads.block import BlockConfig, BlockHead
from drafters.heads.block_files import load_block
from drafters.heads.bound import row_of
from drafters.heads.training import (
    Anchors,
    Prediction,
    TargetStates,
    TextBatch,
    TrainedHead,
    additive,
    borrowed,
    frozen_copy,
    most_frequent,
    take_output,
)
from drafters.own_model import Loaded, Options, OwnModelDrafter, layers_given
from specdec.arguments import instance, whole
from specdec.drafting.block_scorer import BlockScorer
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Drafter, Sizes
from specdec.target.target import Target
from specdec.topology import Topology


class BlockDrafter(OwnModelDrafter):
    """Drafts with a block drafter's head: one forward for a whole tree, however deep.

    Without a Markov head the places know nothing of each other's tokens, so that a level of a tree has the same tokens
    below every node. With one, the logits of a place depend on the token before it, branch by branch: a chain drawn
    place by place follows q exactly, and trees may be drawn without replacement.

    Args:
        head: The head. ``bind`` does not change it.
        tree: A tree builder, or what ``TreeShape.of`` takes; None for a chain of all tokens that a block predicts. With
            ``ExpansionTree(nodes, depth, width=nodes)`` and a head without a Markov head, the tree is DDTree's: the
            most probable paths of all.
        block_size: Places of a block; None for as many as in training. Fewer work, more do not help.
        mask_token_id: The mask token, in place of the one that the head's files name.
        hidden_layers: The target's hidden states that the head reads, numbered as in ``Drafter.hidden_layers``, in
            place of those that its files name.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, or the tree is deeper than a block.
    """

    at_once = True

    def __init__(
        self,
        head: BlockHead,
        tree: AnyTree | None = None,
        *,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_layers: Sequence[int] | None = None,
        **options: Unpack[Options],
    ):
        instance("head", head, BlockHead, "a head, or load one with BlockDrafter.from_pretrained(…)")
        config = head.config
        least = 1 if config.shifted else 2
        self.block_size = whole("block_size", config.block_size if block_size is None else block_size, least=least)
        self.tokens = self.block_size if config.shifted else self.block_size - 1
        self.mask_token_id = whole(
            "mask_token_id", config.mask_token_id if mask_token_id is None else mask_token_id, least=0
        )
        builder = tree_of(self.tokens if tree is None else tree)
        if builder.max_depth > self.tokens:
            raise ValueError(
                f"the tree is {builder.max_depth} deep and a block of {self.block_size} places predicts {self.tokens} "
                f"tokens: give a shallower tree"
            )
        super().__init__(builder, **{**options, "name": options.get("name") or type(head).__name__})
        self.head = head
        chosen = layers_given(hidden_layers)
        self.hidden_layers = head.hidden_layers if chosen is None else chosen
        # A leaf's law is said by one more place.
        self.has_leaf_probs = builder.has_leaf_probs and builder.max_depth < self.tokens

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_layers: Sequence[int] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[Loaded],
    ) -> "BlockDrafter":
        """Load a head from a folder, the hub, or this package (``"bundled/…"``), in any layout of ``block_files``.

        Arguments and errors are those of ``load_block`` and of the class, whose ``tree`` is called ``shape`` here.
        ``bind`` copies the weights to the target's device and dtype.
        """
        chosen = layers_given(hidden_layers)

        def load(**where: Any) -> BlockHead:
            return load_block(
                path, dtype=dtype, device=device, hidden_layers=chosen, mask_token_id=mask_token_id, **where
            )

        return cls.loaded(path, load, shape, {**options, "block_size": block_size})

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check that the head fits the target, and allocate its cache."""
        head = self.beside(self.head, self.hidden_layers, target, sizes)
        self._check_block(head, target)
        block = head.config.block(self.block_size, target.device)
        runner = self.runner_for(
            head, "head", sizes, max_nodes=self.block_size - 1, attention=self._attention_for(block, target)
        )
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        config, markov, confidence = head.config, head.markov_head, head.confidence_head
        condition = None if markov is None else ModuleCaller(markov, optimize=self.optimize)
        judge = None if confidence is None else ModuleCaller(confidence, optimize=self.optimize)

        def accepted(tokens: Tensor, hidden: Tensor) -> Tensor:
            assert confidence is not None and judge is not None
            known = markov.embed(tokens) if confidence.rank and markov is not None else None
            return torch.sigmoid(judge(hidden, known))

        scorer = BlockScorer(
            runner,
            block=block,
            shifted=config.shifted,
            mask_token=self.mask_token_id,
            layers=self.hidden_layers,
            last_state=config.num_hidden_layers,
            max_shown=self.tree.max_shown,
            to_head=row_of(head, target.vocab_size),
            condition=condition,
            reads_hidden=markov is not None and markov.reads_hidden,
            state_width=0 if markov is None else markov.state_width,
            confidence=None if confidence is None else accepted,
            version=lambda: tuple(each.version for each in (condition, judge) if each is not None),
        )
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=self.hidden_layers)

    def _attention_for(self, block: Topology, target: Target) -> str:
        """The name of an attention backend that knows what the places of a block see.

        Raises:
            ValueError: The one that was asked for does not.
        """
        if block.windowed is None or self.attention not in ("auto", "native"):
            return self.attention
        if self.attention == "native":
            raise ValueError(
                f"attention='native': the head {self.name} has sliding layers that see a block in another way than its "
                f"full layers, or from its root, which that code does not know: give auto or grouped"
            )
        return "grouped" if target.device.type == "cpu" else "auto"

    def _check_block(self, head: BlockHead, target: Target) -> None:
        """Refuse a target whose layers, tokens or output layer are not those that a bound head was made for."""
        config, remedy = head.config, "give a head that was trained on this target"
        embeddings, output = head.get_input_embeddings(), head.get_output_embeddings()
        rows, columns, layers = embeddings.weight.shape[0], output.weight.shape[0], target.num_layers
        inflated = signal_width(target.model) < target.model.config.get_text_config(decoder=True).hidden_size
        if self.mask_token_id >= rows:
            raise ValueError(
                f"the head {self.name} fills its places with the mask token {self.mask_token_id}, and the embeddings "
                f"have {rows} rows: give mask_token_id=…, or a head that was trained on this target"
            )
        if not inflated and config.target_layers not in (None, layers):
            raise ValueError(
                f"the head {self.name} was trained on a target of {config.target_layers} layers, and {target.name} has "
                f"{layers}: {remedy}"
            )
        if head.draft_ids is None and config.markov_rank and columns != config.columns:
            raise ValueError(
                f"the head {self.name} drafts {config.columns} tokens and the output layer of {target.name} has "
                f"{columns}: {remedy}"
            )


class TrainedBlock(TrainedHead):
    """A ``BlockHead``. ``shifted`` and ``markov_rank`` make it DFlash's or DSpark's.

    A block begins at an anchor: its root's token is known, and the target's states of everything before it. Some
    anchors are drawn from every row, and all their blocks run in one forward: each sees its own context and its own
    slots.

    The other arguments are fields of ``BlockConfig``.

    Args:
        name: A head to go on from; None for new weights.
        anchors: Blocks that are trained per row of a step.
        hidden_layers: The target's states that are read; None for the usual ones.
        mask_token_id: The token of the slots that are to be filled; None for the target's last id.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        layers: Decoder layers.
        intermediate_size: Width of the MLPs; None for the target's.
        sliding_window: How many positions all layers but the last see; None for all positions.
        owns_output: Whether it has an output layer of its own, which begins as the target's; a reduced vocabulary needs
            one.
        confidence_weight: How much the confidence head's loss counts.

    Raises:
        ValueError: An argument is out of its range.
    """

    title = "block drafter's head"
    head: BlockHead
    _borrowed: tuple[Any, Any]

    def __init__(
        self,
        *,
        name: str | None = None,
        block_size: int = 8,
        shifted: bool = False,
        anchors: int = 64,
        hidden_layers: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        draft_vocabulary: int | None = None,
        layers: int = 2,
        intermediate_size: int | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        causal_in_windows: bool | None = None,
        owns_output: bool = False,
        markov_rank: int = 0,
        markov_head_type: str = "vanilla",
        confidence: bool = False,
        confidence_with_markov: bool = True,
        confidence_weight: float = 1.0,
    ):
        super().__init__(max(block_size if shifted else block_size - 1, 1))
        if block_size < (1 if shifted else 2):
            raise ValueError(f"head.block_size={block_size}: give at least {1 if shifted else 2}")
        if anchors < 1:
            raise ValueError(f"head.anchors={anchors}: give at least 1")
        if markov_head_type not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"head.markov_head_type={markov_head_type!r}: give vanilla, gated or rnn")
        self.name, self.blocks, self.shifted = name, anchors, shifted
        self.draft_columns = draft_vocabulary if name is None else None
        self.confidence_weight = confidence_weight if confidence else 0.0
        self.options: dict[str, Any] = {
            "block_size": block_size,
            "shifted": shifted,
            "hidden_layers": None if hidden_layers is None else tuple(hidden_layers),
            "mask_token_id": mask_token_id,
            "layers": layers,
            "causal": causal,
            "owns_output": owns_output or draft_vocabulary is not None,
            "markov_rank": markov_rank,
            "markov_head_type": markov_head_type,
            "confidence": confidence,
            "confidence_with_markov": confidence_with_markov and markov_rank > 0,
        }
        if intermediate_size is not None:
            self.options["intermediate_size"] = intermediate_size
        if sliding_window is not None:
            types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
            window = whole("head.sliding_window", sliding_window, least=1)
            self.options |= {"layer_types": types, "use_sliding_window": True, "sliding_window": window}
            self.options["causal_in_windows"] = causal_in_windows

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make or load the head, in float32.

        Raises:
            ValueError: A loaded head has blocks of another kind, or a mask token is not one of the target's.
        """
        mask = self.options["mask_token_id"]
        if mask is not None and not 0 <= mask < target.vocab_size:
            raise ValueError(
                f"head.mask_token_id={mask}: the target {target.name} has the tokens 0 to {target.vocab_size - 1}"
            )
        if self.name is not None:
            head = load_block(self.name).float()
            if (head.config.block_size, head.config.shifted) != (self.options["block_size"], self.shifted):
                raise ValueError(
                    f"head.name={self.name!r} has blocks of {head.config.block_size} slots with "
                    f"shifted={head.config.shifted}: give head.block_size and head.shifted to match"
                )
        else:
            ids = most_frequent(counts, self.draft_columns)
            head = BlockHead.for_target(target.model, draft_ids=ids, **self.options).float()
            take_output(head, target)
        self.head, self.hidden_layers = head, head.hidden_layers
        self._borrowed = borrowed(head, target)

    def anchors(self, batch: TextBatch, generator: torch.Generator) -> Anchors:
        """A sample of the positions where a draft can begin, as many per row."""
        return Anchors.everywhere(batch, self.depths).sampled(batch, self.blocks, generator)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        """Runs the context of all rows, then all blocks behind it."""
        head = self.head
        hidden = self.filled([states.hidden[layer].to(head.dtype) for layer in self.hidden_layers], batch, anchors)
        previous, confidence, markov = batch.tokens.flatten()[anchors.places(batch)], None, head.markov_head
        if head.confidence_head is not None:
            known = markov.embed(previous) if markov is not None and head.confidence_head.rank else None
            confidence = head.confidence_head(hidden, known)
        found, state = list(hidden.unbind(1)), None
        if markov is not None and markov.state_width:  # it carries a state down the text's own tokens
            state = hidden.new_zeros(len(hidden), markov.state_width)
            for depth, inner in enumerate(hidden.unbind(1)):
                found[depth] = torch.cat([inner, state], -1)
                state = markov(previous[:, depth], inner, state)[1]
        return Prediction(found, confidence)

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """The slots' logits, with the Markov head's part."""
        width = self.head.config.hidden_size
        hidden, state = states[:, :width], states[:, width:]
        logits = self.head.logits_of(hidden, self._borrowed[1])
        if self.head.markov_head is not None:
            logits = logits + self.head.markov_head(previous, hidden, state if state.shape[1] else None)[0]
        return logits.float()

    def drafter(self) -> Drafter:
        return BlockDrafter(frozen_copy(self.head), optimize=False)

    def filled(
        self, states: list[Float[Tensor, "row position hidden"]], batch: TextBatch, anchors: Anchors
    ) -> Float[Tensor, "anchor depth hidden"]:
        """The normed outputs of the slots that predict a token, for a block at every anchor, as many in every row."""
        head, (rows, length) = self.head, batch.tokens.shape
        size, count = head.config.block_size, len(anchors.index) // rows
        cache = DynamicCache()
        head(features=torch.cat(states, -1), position_ids=batch.positions, past_key_values=cache)
        roots = anchors.index.view(rows, count)
        slots = torch.full((rows, count, size), head.config.mask_token_id, device=roots.device)
        slots[:, :, 0] = batch.tokens.flatten()[roots]
        ahead = torch.arange(size, device=roots.device)
        place = roots - torch.arange(rows, device=roots.device)[:, None] * length
        masks = {
            kind: additive(
                block_mask(place, batch.documents, head.config, windowed=kind != "full_attention"), head.dtype
            )
            for kind in dict.fromkeys(head.config.layer_types or ())
        }
        found = head.run(
            self._borrowed[0](slots.flatten(1)),
            position_ids=(batch.positions.flatten()[roots][:, :, None] + ahead).flatten(1),
            attention_mask=masks,
            past_key_values=cache,
        )
        hidden = found[-1].unflatten(1, (count, size)).flatten(0, 1)
        return hidden if head.config.shifted else hidden[:, 1:]


def block_mask(
    places: Int[Tensor, "row block"], documents: Int[Tensor, "row position"], config: BlockConfig, *, windowed: bool
) -> Bool[Tensor, "row slot key"]:
    """Return the visibility of the slots of packed blocks: their document before the anchor, and their own block.

    With three positions, an anchor at 2 and two slots, the keys are the positions 0, 1, 2 and then the slots: both
    slots see 0, 1 and both slots (a causal block's first slot does not see the second).

    Args:
        places: Where the anchors are in their rows.
        config: Says what slots see.
        windowed: Whether the mask is that of sliding layers.
    """
    (rows, blocks), size = places.shape, config.block_size
    length = documents.shape[1]
    own = documents.gather(1, places)
    before = torch.arange(length, device=places.device) < places[:, :, None]
    context = before & (documents[:, None] == own[:, :, None])
    context = context[:, :, None].expand(rows, blocks, size, length)
    seen = config.block(size, places.device).in_layers(windowed=windowed)
    within, depth = seen.ancestors[0], seen.depth[0]  # of the root's for all slots where windows count from the root
    if windowed and config.sliding_window is not None:
        stand = places[:, :, None] + depth
        context = context & (stand[..., None] - torch.arange(length, device=places.device) < config.sliding_window)
        within = within & (depth[:, None] - depth < config.sliding_window)
    context = context.flatten(1, 2)
    slot = torch.arange(blocks * size, device=places.device)
    together = slot[:, None] // size == slot // size
    together = together & within.repeat(blocks, blocks)
    return torch.cat([context, together.expand(rows, -1, -1)], -1)
