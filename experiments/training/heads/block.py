"""Block drafters: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

A block begins at an anchor: its root's token is known, and the target's states of everything before it. Some anchors
are drawn from every row, and all their blocks run in one forward: each sees its own context and its own slots.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead
from drafters.heads.block_files import load_block
from experiments.training.batch import Anchors, Batch, TargetStates, every_anchor
from experiments.training.heads.base import Prediction, TrainedHead, embeddings_of, frozen_copy, output_layer_of
from experiments.training.heads.feature import most_frequent, take_output
from experiments.training.states import additive
from specdec.interfaces import Drafter
from specdec.target.target import Target


class TrainedBlock(TrainedHead):
    """A ``BlockHead``. ``shifted`` and ``markov_rank`` make it DFlash's or DSpark's.

    Args:
        name: A head to go on from; None for new weights.
        block_size: Places of a block.
        shifted: Whether slot j predicts the token of slot j + 1 (DSpark: ``block_size`` tokens), or its own (DFlash:
            one token less).
        anchors: Blocks that are trained per row of a step.
        hidden_layers: The target's states that are read; None for the usual ones.
        mask_token_id: The token of the slots that are to be filled; None for the target's last id.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        layers: Decoder layers.
        intermediate_size: Width of the MLPs; None for the target's.
        causal: Whether a slot sees only those before it.
        owns_output: Whether it has an output layer of its own, which begins as the target's; a reduced vocabulary needs
            one.
        markov_rank: Width of the Markov head; 0 for none.
        markov_head_type: ``"vanilla"``, ``"gated"`` or ``"rnn"``.
        confidence: Whether there is a confidence head.
        confidence_with_markov: Whether it reads the Markov head's embedding of the token before.
        confidence_weight: How much its loss counts.

    Raises:
        ValueError: An argument is out of its range.
    """

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
        owns_output: bool = False,
        markov_rank: int = 0,
        markov_head_type: str = "vanilla",
        confidence: bool = False,
        confidence_with_markov: bool = True,
        confidence_weight: float = 1.0,
    ):
        super().__init__()
        if block_size < (1 if shifted else 2):
            raise ValueError(f"head.block_size={block_size}: give at least {1 if shifted else 2}")
        if anchors < 1:
            raise ValueError(f"head.anchors={anchors}: give at least 1")
        if markov_head_type not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"head.markov_head_type={markov_head_type!r}: give vanilla, gated or rnn")
        self.name, self.blocks, self.shifted = name, anchors, shifted
        self.depths = block_size if shifted else block_size - 1
        self.draft_vocabulary = draft_vocabulary
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
        self.head: BlockHead | None = None
        self._borrowing: tuple[BlockHead] | None = None
        self._target: tuple[Target] | None = None

    @property
    def draft_columns(self) -> int | None:
        """The size of the draft vocabulary of new weights."""
        return self.draft_vocabulary if self.name is None else None

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
            ids = None
            if self.draft_columns is not None:
                assert counts is not None
                ids = most_frequent(counts, self.draft_columns)
            head = BlockHead.for_target(target.model, draft_ids=ids, **self.options).float()
            take_output(head, target)
        self.head, self.columns, self.hidden_layers = head, head.draft_ids, head.hidden_layers
        self._target = (target,)

    def anchors(self, batch: Batch, generator: torch.Generator) -> Anchors:
        """A sample of the positions where a draft can begin: as many per row, in ascending order.

        A row with too few of them is filled up with anchors that predict nothing.
        """
        return sampled(every_anchor(batch, self.depths), batch, self.blocks, generator)

    def forward(self, batch: Batch, states: TargetStates, anchors: Anchors) -> Prediction:
        """Runs the context of all rows, then all blocks behind it."""
        head = self._borrowing_head()
        parts = [states.hidden[layer].to(head.dtype) for layer in self.hidden_layers]
        hidden = filled(head, parts, batch, anchors)
        previous = batch.tokens.flatten()[anchors.places(batch)]
        return Prediction(list(self._with_states(hidden, previous).unbind(1)), self._confidence(hidden, previous))

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """The slots' logits, with the Markov head's part."""
        head = self._borrowing_head()
        hidden, state = states.split([head.config.hidden_size, states.shape[1] - head.config.hidden_size], dim=1)
        logits = head.logits_of(hidden)
        if head.markov_head is not None:
            logits = logits + head.markov_head(previous, hidden, state if state.shape[1] else None)[0]
        return logits.float()

    def drafter(self) -> Drafter:
        """A chain of a whole block."""
        return BlockDrafter(frozen_copy(self.head), optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the head in bfloat16."""
        frozen_copy(self.head).to(torch.bfloat16).save_pretrained(folder)

    def _with_states(
        self, hidden: Float[Tensor, "anchor depth hidden"], previous: Int[Tensor, "anchor depth"]
    ) -> Float[Tensor, "anchor depth width"]:
        """The hidden states with those that a recurrent Markov head carries down the text's own tokens."""
        markov = self._borrowing_head().markov_head
        if markov is None or not markov.state_width:
            return hidden
        state: Any = hidden.new_zeros(len(hidden), markov.state_width)
        found = []
        for depth in range(hidden.shape[1]):
            found.append(torch.cat([hidden[:, depth], state], -1))
            state = markov(previous[:, depth], hidden[:, depth], state)[1]
        return torch.stack(found, 1)

    def _confidence(
        self, hidden: Float[Tensor, "anchor depth hidden"], previous: Int[Tensor, "anchor depth"]
    ) -> Float[Tensor, "anchor depth"] | None:
        head = self._borrowing_head()
        if head.confidence_head is None:
            return None
        known = None
        if head.confidence_head.rank:
            assert head.markov_head is not None
            known = head.markov_head.embed(previous)
        return head.confidence_head(hidden, known)

    def _borrowing_head(self) -> BlockHead:
        """The head with the target's embeddings and output layer where it has none; the parameters are shared.

        It is made when it is first used, because a module that moves to a device gets new buffers.
        """
        if self._borrowing is None:
            assert self.head is not None and self._target is not None, "begin comes first"
            model = self._target[0].model
            shared = [*self.head.parameters(), *self.head.buffers()]
            twin = copy.deepcopy(self.head, {id(each): each for each in shared})
            twin.embed_tokens = twin.embed_tokens or embeddings_of(model)
            twin.lm_head = twin.lm_head or output_layer_of(model)
            self._borrowing = (twin,)
        return self._borrowing[0]


def filled(
    head: BlockHead, states: list[Float[Tensor, "row position hidden"]], batch: Batch, anchors: Anchors
) -> Float[Tensor, "anchor depth hidden"]:
    """The normed outputs of the slots that predict a token, for a block at every anchor.

    Args:
        head: The head, with embeddings.
        states: The target's, in the order that the head reads them.
        batch: The tokens.
        anchors: As many in every row.
    """
    rows, length = batch.tokens.shape
    size, count = head.config.block_size, len(anchors.index) // rows
    cache = DynamicCache()
    head(features=head.features_of(states), position_ids=batch.positions, past_key_values=cache)
    roots = anchors.index.view(rows, count)
    slots = torch.full((rows, count, size), head.config.mask_token_id, device=roots.device)
    slots[:, :, 0] = batch.tokens.flatten()[roots]
    ahead = torch.arange(size, device=roots.device)
    positions = (batch.positions.flatten()[roots][:, :, None] + ahead).flatten(1)
    place = roots - torch.arange(rows, device=roots.device)[:, None] * length
    seen = block_mask(place, batch.documents, size, causal=head.config.causal)
    output = head(
        input_ids=slots.flatten(1),
        position_ids=positions,
        attention_mask=additive(seen, head.dtype),
        past_key_values=cache,
        output_hidden_states=True,
        logits_to_keep=1,
    )
    assert output.hidden_states is not None
    hidden = output.hidden_states[-1].unflatten(1, (count, size)).flatten(0, 1)
    return hidden if head.config.shifted else hidden[:, 1:]


def sampled(anchors: Anchors, batch: Batch, count: int, generator: torch.Generator) -> Anchors:
    """Returns ``count`` anchors of every row, drawn without replacement, in ascending order.

    Args:
        anchors: All that there are.
        batch: The rows.
        count: How many per row; fewer if the rows are shorter than that.
        generator: On the CPU.
    """
    rows, length = batch.tokens.shape
    count = min(count, length)
    device = anchors.index.device
    there = torch.zeros(rows * length, dtype=torch.bool, device=device)
    there[anchors.index] = True
    # Those that are there draw a number below 1, the others one above; the smallest are taken.
    numbers = torch.rand(rows * length, generator=generator).to(device) + (~there)
    chosen = numbers.view(rows, length).topk(count, largest=False).indices.sort(1).values
    index = (chosen + torch.arange(rows, device=device)[:, None] * length).flatten()
    valid = torch.zeros(rows * length, anchors.valid.shape[1], dtype=torch.bool, device=device)
    valid[anchors.index] = anchors.valid
    return Anchors(index, valid[index], valid[index])


def block_mask(
    places: Int[Tensor, "row block"], documents: Int[Tensor, "row position"], size: int, *, causal: bool
) -> Bool[Tensor, "row slot key"]:
    """Returns what the slots of packed blocks see: their document before the anchor, and their own block.

    With three positions, an anchor at 2 and two slots, the keys are the positions 0, 1, 2 and then the slots: both
    slots see 0, 1 and both slots (a causal block's first slot does not see the second).

    Args:
        places: Where the anchors are in their rows.
        documents: The documents of the rows.
        size: Places of a block.
        causal: Whether a slot sees only those before it, and itself.
    """
    rows, blocks = places.shape
    length = documents.shape[1]
    own = documents.gather(1, places)
    before = torch.arange(length, device=places.device) < places[:, :, None]
    context = before & (documents[:, None] == own[:, :, None])
    context = context[:, :, None].expand(rows, blocks, size, length).flatten(1, 2)
    slot = torch.arange(blocks * size, device=places.device)
    together = slot[:, None] // size == slot // size
    if causal:
        together = together & (slot[:, None] >= slot)
    return torch.cat([context, together.expand(rows, -1, -1)], -1)
