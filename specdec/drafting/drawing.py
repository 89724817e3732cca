"""How the children of a round's nodes are drawn: the law, the requests' parameters, the drafter's vocabulary."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.calibration import Rater
from specdec.drafting.vocabulary import VocabularyMap
from specdec.random import Purpose, uniforms
from specdec.sampling import SamplingTensors, adjust, distribution, forbid_ends, path_tokens, warmed
from specdec.types import DraftSampling


@dataclass(frozen=True, eq=False)
class Drawing:
    """A round's requests, as tree builders read them.

    Attributes:
        law: How siblings are drawn for sampled requests. Greedy requests get the most probable tokens.
        sampling: The requests' parameters, over the scorer's columns.
        sampled: Whether anything is drawn at random.
        greedy: Which rows are greedy among others that are sampled; None if there is no such mixture.
        leaves: Whether q is wanted at every node, leaves included.
    """

    batch: Batch
    vocabulary: VocabularyMap
    law: DraftSampling
    sampling: SamplingTensors
    sampled: bool
    greedy: Bool[Tensor, "batch 1"] | None
    leaves: bool
    rater: Rater | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        vocabulary: VocabularyMap,
        law: DraftSampling,
        temperature: float | None,
        *,
        leaves: bool = False,
        rater: Rater | None = None,
    ) -> "Drawing":
        tables = {name: vocabulary.columns(table) for name, table in batch.sampling.tables.items()}
        sampling = replace(batch.sampling, tables=tables) if tables else batch.sampling
        if temperature is not None and sampling.any_sampled:
            own = torch.where(sampling.temperature == 0, 0.0, temperature)
            sampling = replace(sampling, temperature=own)
        sampled = sampling.any_sampled and law is not DraftSampling.DETERMINISTIC
        greedy = (sampling.temperature == 0)[:, None] if sampled and sampling.any_greedy else None
        if leaves and sampling.any_greedy:
            sampling = warmed(sampling, batch.drafting)
        return cls(batch, vocabulary, law, sampling, sampled, greedy, leaves, rater)

    @property
    def fresh(self) -> bool:
        return self.sampled and self.law is not DraftSampling.COUPLED

    @property
    def by_path(self) -> bool:
        """Whether the tokens above a node change its scores: there is a penalty, or a grammar masks drafts."""
        return self.sampling.by_path or self.batch.masks_drafts

    def uniforms(self, count: int) -> Float[Tensor, "batch draw"]:
        """Return the round's random numbers: number i belongs to node i + 1, in whichever order nodes are drawn."""
        return uniforms(self.batch.keys, self.batch.rounds, Purpose.DRAFT, count)

    def scores(
        self,
        logits: Float[Tensor, "batch some column"],
        tokens: Int[Tensor, "batch node"] | None = None,
        above: Bool[Tensor, "batch some node"] | None = None,
    ) -> Float[Tensor, "batch some token"]:
        """Return logits with bias, penalties, grammars and early ends, of the columns that are tokens of the target.

        ``above`` marks the nodes of the tree so far (``tokens``) above or at each scored node; needed if ``by_path``.
        """
        paths = None
        if self.sampling.by_path:
            assert tokens is not None and above is not None, "a penalty needs the nodes above"
            paths = path_tokens(self.vocabulary.to_drafter(tokens), above)
        scores = self.masked(adjust(self.vocabulary.present(logits, -torch.inf), self.sampling, paths), tokens, above)
        if paths is None:
            return scores
        return forbid_ends(scores, self.sampling, self.batch.lengths[:, None] + (paths >= 0).sum(-1) - 1)

    def masked(
        self,
        scores: Float[Tensor, "batch some token"],
        tokens: Int[Tensor, "batch node"] | None,
        above: Bool[Tensor, "batch some node"] | None,
    ) -> Float[Tensor, "batch some token"]:
        """Return scores with -inf where a grammar forbids a token, unless it forbids all that have a column."""
        if not self.batch.masks_drafts:
            return scores
        assert tokens is not None and above is not None, "a grammar needs the nodes above"
        matchers = self.batch.matchers
        bits = matchers.ask(matchers.question(self.batch.slots, tokens, above), drafts=True)
        allowed = self.vocabulary.present(self.vocabulary.columns(matchers.unpacked(bits)), False)
        return scores.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)

    def distribution(self, scores: Float[Tensor, "batch some token"]) -> Float[Tensor, "batch some token"]:
        return distribution(scores, self.sampling)

    def room(self, nodes: int) -> Float[Tensor, "batch node vocab"]:
        return torch.zeros(len(self.batch), nodes, self.vocabulary.target, device=self.batch.device)

    def law_of(
        self, tokens: Int[Tensor, "batch node"], drawn: Bool[Tensor, "batch node"] | None = None
    ) -> DraftSampling | Int8[Tensor, "batch node"]:
        """Return the law of nodes, of which only those ``drawn`` were drawn for sampled requests; None for all."""
        if not self.sampled or (self.greedy is None and drawn is None):
            return self.law if self.sampled else DraftSampling.DETERMINISTIC
        law = torch.full_like(tokens, int(self.law), dtype=torch.int8)
        for chosen in (self.greedy, None if drawn is None else ~drawn):
            law = law if chosen is None else law.masked_fill(chosen, int(DraftSampling.DETERMINISTIC))
        return law
