"""Block drafters' heads, in all the ways in which their places may be meant."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from drafters.block import BlockDrafter
from experiments.inspecting.alternatives import (
    other_columns,
    other_ends,
    other_layers,
    other_norms,
    other_ropes,
    other_states,
)
from experiments.inspecting.text import Text
from experiments.inspecting.wiring import Family, Mistake, Variation, Wiring, twin
from experiments.training.heads.block import filled
from specdec.inflate import signal_width
from specdec.target.target import Target

_MOST_TOKENS = 24
"""Mask tokens that are tried."""


class BlockFamily(Family):
    """A head that fills the places of a block.

    Args:
        drafter: Bound to the target.
        target: The target.

    Raises:
        ValueError: The target is an inflated one.
    """

    def __init__(self, drafter: BlockDrafter, target: Target):
        if signal_width(target.model) < target.model.config.get_text_config(decoder=True).hidden_size:
            raise ValueError("a block drafter is inspected with the target itself: give one that is not inflated")
        self.target, self.head = target, drafter.head
        bound = twin(drafter.head.bound(target.model))
        bound.config.mask_token_id, bound.config.block_size = drafter.mask_token_id, drafter.block_size
        # So many tokens are predicted in both forms of a block.
        self.depths = max(1, drafter.block_size - 1)
        self.wiring = Wiring(head=bound, layers=tuple(drafter.hidden_layers), columns=bound.draft_ids)

    @torch.no_grad()
    def logits(self, wiring: Wiring, text: Text) -> Iterator[Tensor]:
        """See ``Family.logits``."""
        head = wiring.head
        states = [text.states[layer].to(head.dtype) for layer in wiring.layers]
        if wiring.change is not None:
            states = [wiring.change(state) for state in states]
        hidden = filled(head, states, text.batch, text.anchors)[text.kept, : text.depths]
        logits = head.logits_of(hidden)
        if head.markov_head is not None:
            logits = logits + head.markov_head.along(text.previous[:, : hidden.shape[1]], hidden)
        yield from logits.unbind(1)

    def variations(self, wiring: Wiring) -> Iterator[Variation]:
        """See ``Family.variations``."""
        head, target = wiring.head, self.target
        yield from other_layers(wiring, target, last=False)
        yield from self._masks(wiring)
        yield from _forms(wiring, self.depths)
        yield from other_norms(wiring, target, head)
        yield from other_columns(wiring, target)
        own = self.head.embed_tokens
        yield from other_ends(
            wiring,
            target,
            embeddings="its embed_tokens was not trained with it: leave it out of its files",
            tied=None if own is None else self.wiring.head.get_input_embeddings().weight,
        )
        yield from other_ropes(wiring, target, lambda head: head)
        yield from other_states(wiring)
        if head.markov_head is not None:
            found = twin(head)
            found.markov_head = None
            yield Variation(
                "without its Markov head",
                Mistake.OUTPUT,
                "its Markov head was not trained with it: remove markov_head.* and set markov_rank: 0",
                replace(wiring, head=found),
            )

    def _masks(self, wiring: Wiring) -> Iterator[Variation]:
        """Yields other tokens that its places may hold: special ones, and those that no text has."""
        own = wiring.head.config.mask_token_id
        rows = wiring.head.get_input_embeddings().weight.shape[0]
        tokenizer = cast(Any, self.target.tokenizer)
        found: list[int] = [rows - 1, self.target.vocab_size - 1]
        if tokenizer is not None:
            named = [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id]
            found += [token for token in named if isinstance(token, int)]
            found += [len(tokenizer), len(tokenizer) - 1, *sorted(tokenizer.get_added_vocab().values(), reverse=True)]
        found.append(0)
        choices = [token for token in dict.fromkeys(found) if 0 <= token < rows and token != own]
        for token in choices[:_MOST_TOKENS]:
            other = twin(wiring.head)
            other.config.mask_token_id = token
            text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
            yield Variation(
                f"mask token {token}" + (f" ({text})" if isinstance(text, str) else ""),
                Mistake.MASK_TOKEN,
                f"give drafter.mask_token_id={token}, or correct mask_token_id in its config.json",
                replace(wiring, head=other),
            )


def _forms(wiring: Wiring, depths: int) -> Iterator[Variation]:
    """Yields the other forms of a block, and other scales of its embeddings."""
    config = wiring.head.config
    shifted = twin(wiring.head)
    shifted.config.shifted = not config.shifted
    if shifted.config.tokens >= depths:
        name = "every place predicts the next one's token" if shifted.config.shifted else "every place predicts its own"
        word = "true" if shifted.config.shifted else "false"
        projector = "dspark" if shifted.config.shifted else "dflash"
        yield Variation(
            name,
            Mistake.BLOCK,
            f"write 'sample_from_anchor: {word}' (speculators), 'projector_type: {projector}' in dflash_config (z-lab, "
            f"SpecForge) or 'shifted: {word}' (this project) into its config.json",
            replace(wiring, head=shifted),
        )
    causal = twin(wiring.head)
    causal.config.causal = not config.causal
    word = "true" if causal.config.causal else "false"
    yield Variation(
        "a place sees only those before it" if causal.config.causal else "all places see each other",
        Mistake.BLOCK,
        f"write 'is_causal: {word}' (z-lab) or 'causal: {word}' (this project) into its config.json",
        replace(wiring, head=causal),
    )
    factor = config.hidden_size**0.5 if config.input_embedding_scale == 1 else 1.0
    scaled = twin(wiring.head)
    scaled.config.input_embedding_scale = factor
    yield Variation(
        f"embeddings times {factor:.3g}",
        Mistake.EMBEDDINGS,
        f"write 'input_embedding_scale: {factor:.6g}' into its config.json",
        replace(wiring, head=scaled),
    )
