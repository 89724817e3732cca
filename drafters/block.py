"""Block drafters: a small transformer fills all places of a block in one forward.

DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), and trees over what their places say (DDTree, arXiv 2604.12989).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.block import BlockHead
from drafters.heads.block_files import load_block
from drafters.heads.block_wide import widened
from drafters.heads.bound import lengthen, row_of
from drafters.heads.trained_on import trained_on
from drafters.own_model import OwnModelDrafter, layers_given
from specdec.arguments import instance, whole
from specdec.cache.formats import check_format
from specdec.drafting.block_scorer import BlockScorer
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import MOST_PADDING, VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Sizes
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.types import DraftSampling


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
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` or ``"coupled"``; None for ``"deterministic"`` with a tree of the most probable paths,
            and ``"iid"`` otherwise.
        temperature: The drafter's own; None follows each request.
        block_size: Places of a block; None for as many as in training. Fewer work, more do not help.
        mask_token_id: The mask token, in place of the one that the head's files name.
        hidden_layers: The target's hidden states that the head reads, numbered as in ``Drafter.hidden_layers``, in
            place of those that its files name.
        name: Shown in error messages.
        attention: See ``ModelRunner``; for the head's forwards.
        optimize: See ``ModelRunner``; for the head's forwards.
        kv_cache: See ``ModelRunner``; for the head's keys and values.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, or the tree is deeper than a block.
    """

    def __init__(
        self,
        head: BlockHead,
        tree: AnyTree | None = None,
        *,
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_layers: Sequence[int] | None = None,
        name: str = "",
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
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
        name = name or type(head).__name__
        super().__init__(
            builder, sampling, temperature, name=name, attention=attention, optimize=optimize, kv_cache=kv_cache
        )
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
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_layers: Sequence[int] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        any_target: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "BlockDrafter":
        """Load a head from a folder, the hub, or this package (``"bundled/…"``), in any layout of ``block_files``.

        Args:
            path: A folder, a name on the hub, or ``bundled/…``.
            shape: ``tree`` of the class.
            sampling: See the class.
            temperature: See the class.
            block_size: See the class.
            mask_token_id: See the class.
            hidden_layers: See the class.
            dtype: What to load the head in; None for its own. ``bind`` copies it to the target's dtype and device.
            device: Where to load it; None for the CPU.
            attention: See the class.
            optimize: See the class.
            kv_cache: See the class.
            any_target: Whether it may run on another target than the one that its ``training.json`` names.
            revision: Branch, tag or commit of the hub repository.
            subfolder: Folder of the checkpoint within the local folder or the hub repository.
            token: For a repository that is not public.
            cache_dir: Where downloaded files are kept.
            force_download: Download files again even if they are there.
            local_files_only: Use only files that are there, without asking the hub.

        Raises:
            ValueError: There is no such head, or it is of another kind or incomplete; or as the class.
        """
        check_format(kv_cache)  # before anything is loaded
        where: dict[str, Any] = {
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        head = load_block(
            path,
            dtype=dtype,
            device=device or "cpu",
            hidden_layers=layers_given(hidden_layers),
            mask_token_id=mask_token_id,
            **where,
        )
        drafter = cls(
            head,
            shape,
            sampling=sampling,
            temperature=temperature,
            block_size=block_size,
            name=str(path),
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )
        if not any_target:
            drafter.trained_on = trained_on(path, **where)
        return drafter

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check that the head fits the target, and allocate its cache."""
        head, width = self.head, target.model.config.get_text_config(decoder=True).hidden_size
        inflated = signal_width(target.model) < width
        if inflated and head.config.hidden_size == signal_width(target.model):
            head = widened(head, width)  # it costs what such a target's head would
        self._check_fit(head, target, inflated=inflated)
        self.check_trained_on(target)
        head = head.bound(target.model)
        lengthen(head, sizes.max_length)
        runner = self.runner_for(head, "head", sizes, max_nodes=self.block_size - 1)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        scorer = self._scorer(head, runner, target)
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=self.hidden_layers)

    def _scorer(self, head: BlockHead, runner: ModelRunner, target: Target) -> BlockScorer:
        config, markov, confidence = head.config, head.markov_head, head.confidence_head
        condition = None if markov is None else ModuleCaller(markov, optimize=self.optimize)
        judge = None if confidence is None else ModuleCaller(confidence, optimize=self.optimize)

        def accepted(tokens: Tensor, hidden: Tensor) -> Tensor:
            assert confidence is not None and judge is not None
            known = markov.embed(tokens) if confidence.rank and markov is not None else None
            return torch.sigmoid(judge(hidden, known))

        return BlockScorer(
            runner,
            places=self.block_size,
            shifted=config.shifted,
            causal=config.causal,
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

    def _check_fit(self, head: BlockHead, target: Target, *, inflated: bool) -> None:
        """Refuse a target that the head was not made for.

        Raises:
            ValueError: Says what does not fit.
        """
        config = head.config
        text = target.model.config.get_text_config(decoder=True)
        embeddings = target.model.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
        rows = embeddings.weight.shape[0]  # type: ignore[union-attr]
        if self.mask_token_id >= rows:
            raise ValueError(
                f"the head {self.name} fills its places with the mask token {self.mask_token_id}, and the embeddings "
                f"have {rows} rows: give mask_token_id=…, or a head that was trained on this target"
            )
        wrong = [layer for layer in self.hidden_layers if not 0 <= layer < text.num_hidden_layers]
        if wrong:
            raise ValueError(
                f"the head {self.name} reads the hidden states {list(self.hidden_layers)} and the target {target.name} "
                f"has {text.num_hidden_layers} layers, whose inputs are 0 to {text.num_hidden_layers - 1}: give "
                f"hidden_layers=…, or a head that was trained on this target"
            )
        if not inflated and config.target_layers not in (None, text.num_hidden_layers):
            raise ValueError(
                f"the head {self.name} was trained on a target of {config.target_layers} layers, and {target.name} has "
                f"{text.num_hidden_layers}: give a head that was trained on this target"
            )
        read = len(self.hidden_layers) * text.hidden_size
        if head.feature_width != read:
            raise ValueError(
                f"the head {self.name} reads {head.feature_width} channels per position, and "
                f"{len(self.hidden_layers)} hidden states of the target {target.name} have {read}: give a head that "
                f"was trained on this target"
            )
        borrows = head.embed_tokens is None or head.lm_head is None
        if borrows and config.hidden_size != text.hidden_size:
            raise ValueError(
                f"the head {self.name} is {config.hidden_size} wide and borrows the embeddings or the output layer of "
                f"the target {target.name}, which is {text.hidden_size} wide: give a head that was trained on this "
                f"target"
            )
        output = target.model.get_output_embeddings() if head.lm_head is None else head.lm_head
        columns = output.weight.shape[0]  # type: ignore[union-attr]
        full = head.draft_ids is None
        if full and (
            abs(columns - target.vocab_size) > MOST_PADDING or (config.markov_rank and columns != config.columns)
        ):
            raise ValueError(
                f"the head {self.name} drafts {config.columns} tokens and the target {target.name} has "
                f"{target.vocab_size}: give a head that was trained on this target"
            )
        if abs(config.vocab_size - target.vocab_size) > MOST_PADDING:  # as its files state it, if it borrows all layers
            raise ValueError(
                f"the head {self.name} is for a vocabulary of {config.vocab_size} tokens and the target {target.name} "
                f"has {target.vocab_size}: give a head that was trained on this target"
            )
        if head.draft_ids is not None and int(head.draft_ids[-1]) >= target.vocab_size:
            raise ValueError(
                f"the head {self.name} drafts the token {int(head.draft_ids[-1])} and the target {target.name} has "
                f"{target.vocab_size} tokens: give a head that was trained on this target"
            )
