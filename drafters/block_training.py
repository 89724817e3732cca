"""The training of block drafters' heads: blocks at sampled anchors, all in one forward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead
from drafters.heads.block_config import BlockConfig
from drafters.heads.block_files import load_block
from drafters.heads.block_parts import tokens_before
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
from specdec import Drafter, Target
from specdec.arguments import whole
from specdec.filters import first_largest


class TrainedBlock(TrainedHead):
    """A ``BlockHead``: DFlash's, DSpark's (``shifted``, ``markov_rank``), DFlash 2's, Domino's or xPress's.

    A block begins at an anchor: its root's token is known, and the target's states of everything before it. Some
    anchors are drawn from every row, and all their blocks run in one forward (``packed_blocks``).

    Args:
        name: A head to go on from; None for new weights.
        anchors: Blocks per row of a step.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        base_weight: How much the loss counts of the places' own logits, of a head that changes them.
        base_until: The part of the training in which the weight of these falls from 1 to ``base_weight``, while that of
            the changed ones grows to 1, as Domino is trained; None for ``base_weight`` and 1 from the beginning.
        rounds: How many free-running passes of xPress's refiner are trained besides: each reads the most probable
            tokens of the one before, as when it drafts. Their mean loss counts by ``rounds_weight``.
        config: Further fields of ``BlockConfig``, by their names. A ``sliding_window`` is of all layers but the last.
    """

    title = "block drafter's head"
    head: BlockHead

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
        confidence_weight: float = 1.0,
        base_weight: float = 0.0,
        base_until: float | None = None,
        rounds: int = 0,
        rounds_weight: float = 0.3,
        config: Mapping[str, Any] | None = None,
    ):
        whole("head.block_size", block_size, least=1 if shifted else 2)
        super().__init__(block_size if shifted else block_size - 1)
        further = dict(config or {})
        own: dict[str, Any] = {"block_size": block_size, "shifted": shifted, "mask_token_id": mask_token_id}
        own |= {"layers": layers, "hidden_layers": None if hidden_layers is None else tuple(hidden_layers)}
        known = {**BlockConfig.__annotations__, **vars(BlockConfig())}.keys() - own.keys() - {"draft_vocab_size"}
        if unknown := [key for key in further if key not in known]:
            raise ValueError(f"head.config.{unknown[0]} is no further field of a block drafter's head: leave it out")
        for key in (key for key, usual in vars(BlockConfig()).items() if type(usual) is int and key in further):
            whole(f"head.config.{key}", further[key], least=0)
        if further.get("sliding_window") is not None:
            whole("head.config.sliding_window", further["sliding_window"], least=1)
            types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
            further = {"layer_types": types, "use_sliding_window": True, **further}
        for key, value in (("base_weight", base_weight), ("rounds_weight", rounds_weight), ("base_until", base_until)):
            if value is not None and not value >= 0:
                raise ValueError(f"head.{key}={value}: give a number of at least 0")
        self.base_weight, self.base_until = base_weight, base_until
        self.rounds, self.rounds_weight = whole("head.rounds", rounds, least=0), rounds_weight
        self.name, self.blocks, self.shifted = name, whole("head.anchors", anchors, least=1), shifted
        self.draft_columns = draft_vocabulary if name is None else None
        self.confidence_weight = confidence_weight if further.get("confidence") else 0.0
        self.options = own | further

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
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
        return Anchors.everywhere(batch, self.depths).sampled(batch, self.blocks, generator)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
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
    def _best(self, states: list[Float[Tensor, "anchor width"]], previous: Int[Tensor, "anchor depth"]) -> Tensor:
        """The column of the most probable token at each depth, depth by depth so that few logits are kept."""
        depths = range(1, len(states) + 1)
        return torch.stack([first_largest(self.logits(states[d - 1], previous[:, d - 1], d)) for d in depths], 1)

    def logits(self, states: Tensor, previous: Int[Tensor, " place"], depth: int) -> Float[Tensor, "place column"]:
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
    """Returns the normed outputs of all slots, for a block at every anchor, as many in every row."""
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

    With three positions, an anchor at place 2 and two slots, the keys are the positions 0, 1, 2 and then the slots:
    both slots see 0, 1 and both slots (a causal block's first slot does not see the second).
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
