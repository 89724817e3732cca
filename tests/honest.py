"""A small honest drafter, in the kinds that there are."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import Batch, DraftSampling, DraftTree, Session, Sizes, StatelessDrafter, Target, TreeShape
from specdec.random import Purpose, draw, uniforms

PATHS = [(0,), (1,), (0, 0), (1, 0)]


class Honest(StatelessDrafter):
    """Draws two paths from a fixed table: a distribution for every token above. It keeps its contract."""

    shape = TreeShape.from_paths(PATHS)
    law = DraftSampling.IID
    laws = frozenset([DraftSampling.IID])
    max_nodes, max_depth = 4, 2
    is_chain = False

    def bind(self, target: Target, sizes: Sizes) -> Session:
        generator = torch.Generator().manual_seed(1)
        self.table = (2 * torch.randn(target.vocab_size, target.vocab_size, generator=generator)).softmax(-1)
        self.target = target
        return self

    def numbers(self, batch: Batch) -> Float[Tensor, "batch node"]:
        return uniforms(batch.keys, batch.rounds, Purpose.DRAFT, 4)

    def drawn_from(self, batch: Batch, token: Tensor, depth: int) -> Tensor:
        return self.table[token]

    def without(self, weights: Tensor, earlier: list[Tensor]) -> Tensor:
        """What is left for the next sibling."""
        if self.law is DraftSampling.WITHOUT_REPLACEMENT:
            for token in earlier:
                weights = weights.scatter(1, token[:, None], 0.0)
        return weights

    def propose(self, batch: Batch) -> DraftTree:
        numbers, tokens, rows = self.numbers(batch), [batch.roots], []
        for node in range(5):
            if node > 0:
                parent = self.shape.parents[node]
                siblings = [tokens[other] for other in range(1, node) if self.shape.parents[other] == parent]
                weights = self.drawn_from(batch, tokens[parent], self.shape.depths[node])
                tokens.append(draw(self.without(weights, siblings), numbers[:, node - 1]))
            rows.append(self.table[tokens[node]])
        return self.finish(batch, torch.stack(tokens, 1), torch.stack(rows, 1))

    def finish(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], q: Float[Tensor, "batch node vocab"]
    ) -> DraftTree:
        return DraftTree.from_shape(self.shape, tokens, sampling=self.law, draft_probs=q)


class HonestWithoutReplacement(Honest):
    law = DraftSampling.WITHOUT_REPLACEMENT
    laws = frozenset([DraftSampling.WITHOUT_REPLACEMENT])


class HonestTop(Honest):
    law = DraftSampling.DETERMINISTIC
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def read(self, batch: Batch) -> Tensor:
        """The tokens that the drafts follow."""
        return batch.roots

    def propose(self, batch: Batch) -> DraftTree:
        top = self.table.topk(2).indices
        first, second = top[self.read(batch)].unbind(1)
        tokens = torch.stack([batch.roots, first, second, top[first][:, 0], top[second][:, 0]], 1)
        return self.finish(batch, tokens, self.table[tokens])

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        return DraftTree.from_shape(self.shape, tokens)


class HonestLeaves(Honest):
    """Gives q everywhere if it is asked to."""

    has_leaf_probs = True
