"""Block drafters: a small transformer fills all places of a block in one forward.

DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), and trees over what their places say (DDTree, arXiv 2604.12989).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from drafters.heads.block import BlockHead
from drafters.heads.block_files import is_shifted, load_block, save_block
from drafters.heads.block_parts import Refinement
from drafters.heads.bound import row_of
from drafters.heads.files import Public, has
from drafters.own_model import HeadDrafter, HeadOptions, Loaded, LoadedFirst, layers_given
from specdec.arguments import instance, whole
from specdec.drafting.block_scorer import BlockScorer
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.execution.executor import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Description, Sizes
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


class LoadedBlock(Loaded, LoadedFirst, total=False):
    """``Loaded``, ``LoadedFirst``, and settings of a ``BlockDrafter``."""

    block_size: int | None
    mask_token_id: int | None
    passes: int | None


class BlockDrafter(HeadDrafter):
    """Drafts with a block drafter's head: one forward for a whole tree, however deep.

    Without a Markov head the places know nothing of each other's tokens, so that a level of a tree has the same tokens
    below every node. With one, the logits of a place depend on the token before it, branch by branch: a chain drawn
    place by place follows q exactly, and trees may be drawn without replacement.

    Args:
        tree: A tree builder, or what ``TreeShape.of`` takes; None for a chain of all tokens that a block predicts. With
            ``ExpansionTree(nodes, depth, width=nodes)`` and a head without a Markov head, it is DDTree's.
        block_size: Places of a block; None for as many as in training. Fewer work, more do not help.
        mask_token_id: The mask token, in place of the one that the head's files name.
        hidden_layers: The target's hidden states that the head reads, in place of those that its files name.
        passes: How often xPress's refiner fills the block before anything is drafted; 0 refines each place behind the
            tokens drawn before it, None for as often as the head's files say.
    """

    usual: ClassVar = {"family": "block"}
    at_once = True
    public = (
        _published(False, name="dflash", title="a DFlash head"),
        _published(
            True,
            name="dspark",
            title="a DSpark head",
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
    def from_pretrained(cls, path: str | Path, *, shape: AnyTree | None = None, **options: Unpack[LoadedBlock]) -> Any:
        """Load a head with ``load_block``, from a folder, the hub, or this package (``"bundled/…"``)."""
        return cls.loaded(path, load_block, shape, options)

    def describe(self, target: Target | None = None) -> Description:
        found, mask = self.head.describe(), self.mask_token_id
        doubts = {"layers": self.hidden_layers, "mask": mask}
        return replace(found, reads=self.hidden_layers, doubts=doubts, facts={**found.facts, "mask token": str(mask)})

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        head = self.beside(self.head, self.hidden_layers, target, sizes)
        self._check_block(head, target)
        block = head.config.block(self.block_size, target.device)
        runner = self.runner_for(head, "head", sizes, max_nodes=self.block_size - 1)
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
        return ScoredSession(self, scorer, target, sizes, ids=head.draft_ids, hidden_layers=self.hidden_layers)

    def _behind_tokens(self, head: BlockHead, embed: Any, caller: Callable[..., ModuleCaller]) -> dict[str, Any]:
        """Arguments of a ``BlockScorer`` for a head that makes places depend on tokens."""
        places = head.place_head
        if places is None:
            return {}
        if head.refiner_head is not None and self.passes:
            return {"refine": caller(Refinement(head.refiner_head, self.passes, head.draft_ids))}
        call = caller(places)

        def condition(logits: Tensor, tokens: Tensor, depth: int, hidden: Any, state: Any) -> tuple[Tensor, Any]:
            embeds = embed(tokens) if places.reads_embeddings else None
            return call(logits, tokens, depth, hidden=hidden, state=state, embeds=embeds)

        found = {"condition": condition, "state_width": places.state_width}
        if places.reads_hidden:
            found["prepare"] = lambda hidden, before: places.prepare(hidden, self.tokens, before)
        return found

    def _check_block(self, head: BlockHead, target: Target) -> None:
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
