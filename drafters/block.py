"""Block drafters: a small transformer fills all places of a block in one forward.

DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), and trees over what their places say (DDTree, arXiv 2604.12989).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from drafters.heads.block import BlockConfig, BlockHead
from drafters.heads.block_files import is_shifted, load_block, save_block
from drafters.heads.block_parts import KINDS, Refinement, tokens_before
from drafters.heads.bound import row_of
from drafters.heads.files import Public, has, served_as
from drafters.heads.parallel import mask_token
from drafters.heads.training import (
    Anchors,
    Prediction,
    TargetStates,
    Term,
    TextBatch,
    TrainedHead,
    additive,
    borrowed,
    frozen_copy,
    most_frequent,
    take_output,
)
from drafters.own_model import HeadDrafter, HeadOptions, LoadedFirst, layers_given
from specdec.arguments import instance, whole
from specdec.drafting.block_scorer import BlockScorer
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.filters import first_largest
from specdec.inflate import signal_width
from specdec.interfaces import Description, Drafter, Sizes
from specdec.target.target import Target

DECIDES = (
    *("shifted", "causal", "block_size", "mask_token_id", "layer_kind", "columns", "tokens", "vocab_size"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "rope_parameters", "layer_types"),
    *("sliding_window", "hidden_act", "rms_norm_eps", "markov_rank", "markov_head_type", "causal_in_windows"),
    *("window_from_root", "conv_kernel_size", "selector_rank", "selector_top_k", "gru_hidden_dim"),
    *("pure_draft_prefix_len", "xpress_rank", "confidence"),
)


def _published(shifted: bool, **kind: Any) -> Public:
    return Public(
        formats=("native", "speculators", "sglang"),
        holds=lambda names, config: (
            has(names, "fc.weight") and "hidden_norm.weight" in names and is_shifted(config) is shifted
        ),
        read=lambda path, target, **given: load_block(path, **given),
        write=lambda head, folder, target, **to: save_block(head, folder, **to),
        tokens=lambda head: head.config.tokens,
        bounded=True,
        takes=("hidden_layers", "mask_token_id"),
        width="config.target_hidden_size",
        decides=("hidden_layers", *(f"config.{name}" for name in DECIDES)),
        **kind,
    )


class BlockDrafter(HeadDrafter):
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
        hidden_layers: The target's hidden states that the head reads, in place of those that its files name.
        passes: How often xPress's refiner fills the block before anything is drafted; 0 refines each place behind the
            tokens drawn before it, None for as often as the head's files say. Other heads make no passes.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, or the tree is deeper than a block.
    """

    usual: ClassVar = {"family": "block"}
    at_once = True
    public = (
        _published(False, name="dflash", title="a DFlash head", serves=served_as("dflash")),
        _published(
            True,
            name="dspark",
            title="a DSpark head",
            serves=served_as("dspark", draft_sample_method="probabilistic"),
            remark=lambda head, layout: (
                ""
                if layout != "speculators" or head.config.markov_head_type == "vanilla"
                else f"vLLM serves vanilla Markov heads, and this one is {head.config.markov_head_type}"
            ),
        ),
    )

    def __init__(
        self,
        head: BlockHead,
        tree: AnyTree | None = None,
        *,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_layers: Sequence[int] | None = None,
        passes: int | None = None,
        **options: Unpack[HeadOptions],
    ):
        instance("head", head, BlockHead, "a head, or load one with BlockDrafter.from_pretrained(…)")
        config = head.config
        least = 1 if config.shifted else 2
        self.block_size = whole("block_size", config.block_size if block_size is None else block_size, least=least)
        self.tokens = self.block_size if config.shifted else self.block_size - 1
        mask = config.mask_token_id if mask_token_id is None else mask_token_id
        self.mask_token_id = whole("mask_token_id", mask, least=0)
        if passes is not None and not config.xpress_rank:
            raise ValueError(f"passes={passes}: only xPress's heads make passes over a block: leave it out")
        self.passes = whole("passes", config.num_jacobi_passes if passes is None else passes, least=0)
        if self.block_size > config.block_size and config.xpress_rank:
            raise ValueError(
                f"block_size={block_size}: the head mixes {config.block_size} places: give at most as many"
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
        passes: int | None = None,
        **options: Unpack[LoadedFirst],
    ) -> "BlockDrafter":
        """Load a head with ``load_block``, from a folder, the hub, or this package (``"bundled/…"``)."""
        own = {"block_size": block_size, "mask_token_id": mask_token_id, "passes": passes}
        return cls.loaded(path, load_block, shape, {**options, **own})

    def describe(self, target: Target | None = None) -> Description:
        found, mask = self.head.describe(), self.mask_token_id
        doubts = {"layers": self.hidden_layers, "mask": mask}
        return replace(found, reads=self.hidden_layers, doubts=doubts, facts={**found.facts, "mask token": str(mask)})

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        head = self.beside(self.head, self.hidden_layers, target, sizes)
        self._check_block(head, target)
        block = head.config.block(self.block_size, target.device)
        runner = self.runner_for(head, "head", sizes, max_nodes=self.block_size - 1)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        config, markov, confidence = head.config, head.markov_head, head.confidence_head
        to_head, called = row_of(head, target.vocab_size), list[ModuleCaller]()

        def embed(tokens: Tensor) -> Tensor:
            return head.get_input_embeddings()(to_head(tokens))

        def caller(module: nn.Module) -> ModuleCaller:
            called.append(ModuleCaller(module, optimize=self.optimize))
            return called[-1]

        more = self._behind_tokens(head, embed, caller)
        if head.place_head is not None and head.place_head.reads_before:
            more["slots_before"] = sizes.max_batch_size
        if config.conv_kernel_size:
            more["embed"] = embed
        if confidence is not None:
            judge = caller(confidence)

            def accepted(tokens: Tensor, hidden: Tensor) -> Tensor:
                known = markov.embed(tokens) if confidence.rank and markov is not None else None
                return torch.sigmoid(judge(hidden, known))

            more["confidence"] = accepted
        scorer = BlockScorer(
            runner,
            block=block,
            shifted=config.shifted,
            mask_token=self.mask_token_id,
            layers=self.hidden_layers,
            last_state=config.num_hidden_layers,
            max_shown=self.tree.max_shown,
            to_head=to_head,
            version=lambda: tuple(each.version for each in called),
            **more,
        )
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=self.hidden_layers)

    def _behind_tokens(
        self, head: BlockHead, embed: Callable[[Tensor], Tensor], caller: Callable[[nn.Module], ModuleCaller]
    ) -> dict[str, Any]:
        """Arguments of a ``BlockScorer`` for a head that makes places depend on tokens; none without one."""
        places = head.place_head
        if places is None:
            return {}
        if head.refiner_head is not None and self.passes:
            return {"refine": caller(Refinement(head.refiner_head, self.passes, head.draft_ids))}
        call = caller(places)

        def condition(
            logits: Tensor, tokens: Tensor, depth: int, hidden: Tensor | None, state: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            embeds = embed(tokens) if places.reads_embeddings else None
            return call(logits, tokens, depth, hidden=hidden, state=state, embeds=embeds)

        found = {"condition": condition, "state_width": places.state_width}
        if places.reads_hidden:
            found["prepare"] = lambda hidden, before: places.prepare(hidden, self.tokens, before)
        return found

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
        if head.draft_ids is None and head.place_head is not None and columns != config.columns:
            raise ValueError(
                f"the head {self.name} drafts {config.columns} tokens and the output layer of {target.name} has "
                f"{columns}: {remedy}"
            )


class TrainedBlock(TrainedHead):
    """A ``BlockHead``: DFlash's, DSpark's (``shifted``, ``markov_rank``), DFlash 2's, Domino's or xPress's.

    A block begins at an anchor: its root's token is known, and the target's states of everything before it. Some
    anchors are drawn from every row, and all their blocks run in one forward (``packed_blocks``).

    The other arguments are fields of ``BlockConfig``.

    Args:
        name: A head to go on from; None for new weights.
        anchors: Blocks per row of a step.
        hidden_layers: The target's states that are read; None for the usual ones.
        mask_token_id: The token of the slots that are to be filled; None for the target's last id.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        layers: Decoder layers.
        intermediate_size: Width of the MLPs; None for the target's.
        sliding_window: How many positions all layers but the last see; None for all positions.
        owns_output: Whether it has its own output layer, which begins as the target's; a reduced vocabulary needs one.
        confidence_weight: How much the confidence head's loss counts.
        base_weight: How much the loss counts of the places' own logits, of a head that changes them.
        base_until: The part of the training in which the weight of these falls from 1 to ``base_weight``, while that of
            the changed ones grows to 1, as Domino is trained; None for ``base_weight`` and 1 from the beginning.
        rounds: How many free-running passes of xPress's refiner are trained besides: each reads the most probable
            tokens of the one before, as when it drafts.
        rounds_weight: How much their mean loss counts.
        config: Further fields of ``BlockConfig``, by their names.

    Raises:
        ValueError: An argument is out of its range, or unknown.
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
        base_weight: float = 0.0,
        base_until: float | None = None,
        rounds: int = 0,
        rounds_weight: float = 0.3,
        config: Mapping[str, Any] | None = None,
    ):
        whole("head.block_size", block_size, least=1 if shifted else 2)
        super().__init__(block_size if shifted else block_size - 1)
        if markov_head_type not in KINDS:
            raise ValueError(f"head.markov_head_type={markov_head_type!r}: give vanilla, gated or rnn")
        further = dict(config or {})
        unknown = [key for key in further if key not in BlockHead.config_class.__annotations__]
        if unknown:
            raise ValueError(f"head.config.{unknown[0]} is no field of a block drafter's configuration: leave it out")
        for key, value in (("base_weight", base_weight), ("rounds_weight", rounds_weight), ("base_until", base_until)):
            if value is not None and not value >= 0:
                raise ValueError(f"head.{key}={value}: give a number of at least 0")
        self.base_weight, self.base_until = base_weight, base_until
        self.rounds, self.rounds_weight = whole("head.rounds", rounds, least=0), rounds_weight
        self.name, self.blocks, self.shifted = name, whole("head.anchors", anchors, least=1), shifted
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
            **further,
        }
        if intermediate_size is not None:
            self.options["intermediate_size"] = intermediate_size
        if sliding_window is not None:
            types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
            window = whole("head.sliding_window", sliding_window, least=1)
            self.options |= {"layer_types": types, "use_sliding_window": True, "sliding_window": window}
            self.options["causal_in_windows"] = causal_in_windows

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make or load the head, in float32. Raises ValueError: it has other blocks, or no such mask token."""
        mask_token(target.name, target.vocab_size, self.options["mask_token_id"])
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
        head, depths = self.head, self.depths
        read = [states.hidden[layer].to(head.dtype) for layer in self.hidden_layers]
        whole = packed_blocks(head, self._borrowed[0], read, batch, anchors)
        hidden, flat = whole[:, -depths:], batch.tokens.flatten()
        previous, confidence, places = flat[anchors.places(batch)], None, head.place_head
        if head.confidence_head is not None:
            markov = head.markov_head
            known = markov.embed(previous) if markov is not None and head.confidence_head.rank else None
            confidence = head.confidence_head(hidden, known)
        if places is None:
            return Prediction(list(hidden.unbind(1)), confidence)
        known, first = places.prepare(whole, depths, flat[anchors.index - 1])
        embeds = self._borrowed[0](previous) if places.reads_embeddings else None

        def noted(tokens: Tensor) -> list[Tensor]:
            return list(torch.cat([hidden, places.along(tokens, known, first, embeds)], -1).unbind(1))

        terms = []
        if self.base_weight or self.base_until:
            terms.append(Term(list(hidden.unbind(1)), self._base_share))
        if head.refiner_head is not None and self.rounds:
            found = list(hidden.unbind(1))
            for _ in range(self.rounds):
                found = noted(tokens_before(self._best(found, previous), previous[:, 0], head.draft_ids))
                terms.append(Term(found, lambda progress: self.rounds_weight / self.rounds))
        share = (lambda progress: 1 - self._base_share(progress)) if self.base_until else (lambda progress: 1.0)
        return Prediction(noted(previous), confidence, share, terms)

    def _base_share(self, progress: float) -> float:
        """How much the loss of the places' own logits counts."""
        falling = 0.0 if not self.base_until else max(0.0, 1 - progress / self.base_until)
        return self.base_weight + (1 - self.base_weight) * falling

    @torch.no_grad()
    def _best(
        self, states: list[Float[Tensor, "anchor width"]], previous: Int[Tensor, "anchor depth"]
    ) -> Int[Tensor, "anchor depth"]:
        """The column of the most probable token at each depth, depth by depth so that few logits are kept."""
        depths = range(1, len(states) + 1)
        return torch.stack([first_largest(self.logits(states[d - 1], previous[:, d - 1], d)) for d in depths], 1)

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """The slots' logits, changed by what stands before them if the states say it."""
        width, places = self.head.config.hidden_size, self.head.place_head
        logits = self.head.logits_of(states[:, :width], self._borrowed[1])
        if places is not None and states.shape[1] > width:
            more = {"whole": True} if places is self.head.candidate_selector else {}
            logits = places.read(logits, states[:, width:], **more)
        return logits.float()

    def drafter(self) -> Drafter:
        return BlockDrafter(frozen_copy(self.head), optimize=False)


def packed_blocks(
    head: BlockHead,
    embed: nn.Module,
    states: list[Float[Tensor, "row position hidden"]],
    batch: TextBatch,
    anchors: Anchors,
) -> Float[Tensor, "anchor place hidden"]:
    """Returns the normed outputs of all slots, for a block at every anchor, as many in every row.

    Args:
        embed: The input embeddings, or those that the head borrows.
        states: The target's hidden states that the head reads.
    """
    rows, length = batch.tokens.shape
    size, count = head.config.block_size, len(anchors.index) // rows
    cache = DynamicCache()
    head(features=torch.cat(states, -1), position_ids=batch.positions, past_key_values=cache)
    roots = anchors.index.view(rows, count)
    slots = torch.full((rows, count, size), head.config.mask_token_id, device=roots.device)
    slots[:, :, 0] = batch.tokens.flatten()[roots]
    ahead = torch.arange(size, device=roots.device)
    place = roots - torch.arange(rows, device=roots.device)[:, None] * length
    masks = {
        kind: additive(block_mask(place, batch.documents, head.config, windowed=kind != "full_attention"), head.dtype)
        for kind in dict.fromkeys(head.config.layer_types or ())
    }
    found = head.run(
        embed(slots.flatten(1)),
        places=size,
        position_ids=(batch.positions.flatten()[roots][:, :, None] + ahead).flatten(1),
        attention_mask=masks,
        cache=cache,
    )
    return found[-1].unflatten(1, (count, size)).flatten(0, 1)


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
