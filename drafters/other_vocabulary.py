"""A small model with another tokenizer than the target's drafts for it, exactly.

Timor et al. 2025 (arXiv 2502.05202): token-level intersection (TLI) and string-level exact matching (SLEM), which
transformers calls universal assisted generation.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafters.model import ModelDrafter, ModelFiles, check_device
from drafters.own_model import Options
from specdec import Batch, DraftSampling, DraftTree, SamplingParams, Target, Topology
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree
from specdec.drafting.lookup import chains
from specdec.drafting.model_scorer import RetokenizedScorer
from specdec.drafting.scored import ScoredSession
from specdec.filters import first_largest
from specdec.interfaces import Description, Drafter, Session, Sizes
from specdec.target.configuration import check_tokenizer, position_limit
from specdec.target.spelling import Spelling


class TextModel(ModelFiles, total=False):
    """Settings of a model that is loaded for its text; see ``ModelDrafter.from_pretrained``."""

    attention: str
    optimize: bool
    kv_cache: str | None


class TLIDrafter(ModelDrafter):
    """Drafts tokens that both vocabularies have, from the model's distribution renormalized over them (TLI).

    What spells the same is the same token (``Spelling``), whatever its number. Special tokens are left out. q is zero
    for the target's other tokens, which the residual covers. The model's context is the text so far in its own tokens,
    read anew as it grows. ``target_tokenizer`` takes the place of the one that the target comes with.
    """

    same_vocabulary = False

    def __init__(
        self,
        model: PreTrainedModel,
        shape: AnyTree = 4,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(model, shape, tokenizer=tokenizer, **options)
        check_tokenizer(target_tokenizer)
        self.target_tokenizer = target_tokenizer

    def describe(self, target: Target | None = None) -> Description:
        tokens = None if target is None else [token for token, _ in self.common(target)]
        return replace(super().describe(target), tokens=tokens)

    def common(self, target: Target) -> list[tuple[int, int]]:
        """Return the tokens that the target and the model have in common, as pairs of their numbers."""
        source, own = _spellings(self, target, self.target_tokenizer)
        return source.common(own)

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        source, own = _spellings(self, target, self.target_tokenizer)
        pairs = source.common(own)
        if len(pairs) < self.tree.ranks:
            raise ValueError(
                f"the drafter {self.name} and the target {target.name} have {len(pairs) or 'no'} tokens in common, and "
                f"the tree has up to {self.tree.ranks} below a node: draft with SLEMDrafter, which matches text"
            )
        ids, columns = torch.tensor(pairs, device=target.device).T.contiguous()
        to_model = torch.zeros(target.vocab_size, dtype=torch.long, device=target.device)
        to_model[ids] = columns
        scorer = _scorer(self, target, sizes, source, own, to_model=to_model, columns=columns)
        session = ScoredSession(self, scorer, target, sizes, ids=ids)
        session.reads_host = True
        return session


class SLEMDrafter(Drafter):
    """Drafts the text that a model of another vocabulary writes, in the target's tokens (SLEM).

    The model goes on greedily from the text so far, whatever the temperature. What it writes is tokenized with the end
    of the text before it, and the tokens behind that end are drafted; if none begins there, the new text is tokenized
    by itself.

    Args:
        drafter: The model and its tokenizer, with a chain for its shape: tokens of its own vocabulary per draft. A
            draft has at most twice as many of the target's.
        target_tokenizer: The target's, in place of the one that it comes with.
    """

    runs, shown = "model", ModelDrafter.shown
    laws = frozenset([DraftSampling.DETERMINISTIC])
    is_chain = True

    def __init__(self, drafter: ModelDrafter, *, target_tokenizer: PreTrainedTokenizerBase | None = None):
        instance("drafter", drafter, ModelDrafter, "a ModelDrafter(model, 6, tokenizer=tokenizer)")
        check_tokenizer(target_tokenizer)
        if not drafter.is_chain:
            raise ValueError(
                "SLEM drafts the text of one chain, and the shape is a tree: give a length, such as shape=6"
            )
        self.drafter, self.target_tokenizer = drafter, target_tokenizer
        self.max_nodes = self.max_depth = 2 * drafter.max_depth

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, shape: int = 6, **options: Unpack[TextModel]) -> "SLEMDrafter":
        """Load the model and its tokenizer, as ``ModelDrafter.from_pretrained`` does."""
        given: Any = options
        return cls(ModelDrafter.from_pretrained(name_or_path, shape=shape, **given))

    def bind(self, target: Target, sizes: Sizes) -> "SLEMSession":
        source, own = _spellings(self.drafter, target, self.target_tokenizer)
        return SLEMSession(self, _scorer(self.drafter, target, sizes, source, own), source, own)


class SLEMSession(Session):
    """The texts of the running requests of one engine, and the cache of the model that goes on with them."""

    reads_host = True
    lookback = 0

    def __init__(self, drafter: SLEMDrafter, scorer: RetokenizedScorer, source: Spelling, own: Spelling):
        self.models = scorer.models
        self._scorer, self._source, self._own = scorer, source, own
        self._tokens, self._depth = drafter.drafter.max_depth, drafter.max_depth

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._scorer.admit(slot)

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> Hashable:
        return self._scorer.prepare(batch)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        host, scorer = batch.on_host, self._scorer
        count = min(self._tokens, host.deepest)
        if count == 0:
            return DraftTree.root_only(batch.roots)
        written = [first_largest(scorer.root_logits(batch))]
        for level in range(1, count):
            chain = Topology.chain(level + 1, batch.device)
            written.append(first_largest(scorer.level_logits(batch, written[-1], chain, level)))
        tokens = torch.cat(written, dim=1).cpu().numpy()
        branches = np.full((len(batch), self._depth), -1, dtype=np.int64)
        for row in np.flatnonzero(host.drafting & (host.max_depth > 0)).tolist():
            own = tokens[row, : host.max_depth[row]]  # not those that other rows have room for
            text = b"".join(self._own.bytes[token] for token in own)
            drafted = self._source.after(scorer.texts[int(host.slots[row])].tail, text)[: self._depth]
            branches[row, : len(drafted)] = drafted
        if (branches < 0).all():
            return DraftTree.root_only(batch.roots)
        return chains(host.tokens[np.arange(len(batch)), host.lengths], branches, batch.device)


def _spellings(
    drafter: ModelDrafter, target: Target, given: PreTrainedTokenizerBase | None
) -> tuple[Spelling, Spelling]:
    """Return how the target's tokens are spelled, and how the drafter's are."""
    check_device(drafter.model, target)
    if drafter.vocabulary.size is not None:
        raise ValueError("vocabulary: a model of another vocabulary keeps what both have in common: leave it out")
    embeddings: Any = drafter.model.get_input_embeddings()

    def spelling(name: str, tokenizer: PreTrainedTokenizerBase | None, tokens: int) -> Spelling:
        if tokenizer is None:
            raise ValueError(f"the {name} has no tokenizer, and drafts go by the text of tokens: give it one")
        return Spelling(tokenizer, tokens)

    source = spelling(f"target {target.name}", given or target.tokenizer, target.vocab_size)
    return source, spelling(f"drafter {drafter.name}", drafter.tokenizer, embeddings.weight.shape[0])


def _scorer(
    drafter: ModelDrafter, target: Target, sizes: Sizes, source: Spelling, own: Spelling, **columns: torch.Tensor
) -> RetokenizedScorer:
    """Returns the drafter's model as a scorer, with rows of its own in place of the engine's pages."""
    limit = position_limit(drafter.model.config.get_text_config(decoder=True))
    length = min(sizes.max_length, limit or sizes.max_length)
    room = replace(sizes, max_length=length, paging=None)
    runner = drafter.runner_for(drafter.model, "drafter", room, max_nodes=drafter.shown(drafter.tree))
    return RetokenizedScorer(
        runner,
        source,
        own,
        max_batch_size=sizes.max_batch_size,
        max_tokens=max(length - drafter.max_depth, 1),
        width=drafter.max_depth + 2,
        **columns,
    )
