"""Drafters that each break one part of the contract of an honest one."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec import Batch, DraftSampling, DraftTree, Outcome, SamplingParams, Session, Sizes, Target
from specdec.random import Purpose, uniforms
from tests.honest import Honest, HonestLeaves, HonestTop, HonestWithoutReplacement


def broken(base: type[Honest], change: Callable[[DraftTree], DraftTree]) -> type[Honest]:

    class Broken(base):
        def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
            return change(super().finish(batch, tokens, q))

    return Broken


def at(tensor: Tensor, node: int, value: float) -> Tensor:
    """A copy with another value at a node of every row."""
    copy = tensor.clone()
    copy[:, node] = value
    return copy


def parents_of(tree: DraftTree, *parents: int) -> DraftTree:
    table = torch.tensor([parents], device=tree.tokens.device).expand(len(tree.tokens), -1)
    kept = {"valid": tree.valid, "sampling": tree.law, "draft_probs": tree.draft_probs}
    return DraftTree.build(tree.tokens, table, **kept, max_depth=4, max_children=4)


MALFORMED: dict[str, tuple[Callable[[DraftTree], DraftTree], str]] = {
    "half q": (lambda tree: replace(tree, draft_probs=tree.draft_probs.bfloat16()), "shapes, dtypes, device"),
    "two roots": (lambda tree: parents_of(tree, -1, -1, 0, 1, 2), "parents"),
    "no root": (lambda tree: replace(tree, valid=torch.zeros_like(tree.valid)), "valid nodes"),
    "wrong root": (lambda tree: replace(tree, tokens=at(tree.tokens, 0, 3)), "root"),
    "padding": (lambda tree: replace(tree, tokens=at(tree.tokens, 4, -1), valid=at(tree.valid, 4, False)), "tokens"),
    "too deep": (lambda tree: parents_of(tree, -1, 0, 1, 2, 3), "number and depth of nodes"),
    "law": (lambda tree: replace(tree, law=at(tree.law, 3, 2)), "declared laws"),
    "not normalized": (lambda tree: replace(tree, draft_probs=2 * tree.draft_probs), "rows of q"),
    "impossible": (
        lambda tree: replace(
            tree,
            draft_probs=torch.zeros_like(tree.draft_probs).scatter_(2, (tree.tokens[..., None] * 0), 1.0),
            tokens=at(tree.tokens, 3, 5),
        ),
        "possible tokens",
    ),
}  # fmt: skip
"""What is done to an honest tree, and the check that must notice."""


class Twins(HonestTop):
    """Chosen siblings with one token."""

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        tokens[:, 2] = tokens[:, 1]
        return super().finish(batch, tokens, q)


class SaysChain(Honest):
    is_chain = True


class SaysPaths(Honest):
    """A tree with siblings below the first level, which says that its drafts are paths."""

    is_paths = True

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        return parents_of(super().finish(batch, tokens, q), -1, 0, 0, 1, 1)


class TooMany(Honest):
    max_nodes = 3


class NotBound(Honest):
    def bind(self, target: Target, sizes: Sizes) -> Session:
        raise ValueError("this drafter is for another target")


class Stumbles(Honest):
    reads_host = True

    def observe(self, outcome: Outcome) -> None:
        raise ZeroDivisionError("a bug")


class WritesSlots(HonestTop):
    """Uses the engine's own array as scratch."""

    reads_host = True

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        batch.on_host.tokens[:, -1] += 1
        return tree


class TouchesTheTarget(HonestTop):
    """Shares the target's output layer, and changes it when it drafts, unseen by version counters."""

    def propose(self, batch: Batch) -> DraftTree:
        self.target.model.get_output_embeddings().weight.data.abs_()
        return super().propose(batch)


class NeedsRoom(HonestTop):
    """Looks at a position behind the sequence that is not always there."""

    reads_host = True

    def propose(self, batch: Batch) -> DraftTree:
        for tokens, length in zip(batch.on_host.tokens, batch.on_host.lengths, strict=True):
            _ = tokens[length + 3]
        return super().propose(batch)


class OwnRandomness(Honest):
    """Draws from q, with torch's global generator."""

    def numbers(self, batch: Batch) -> Tensor:
        return torch.rand(len(batch), 4, dtype=torch.float64)


class Neighbours(HonestTop):
    """Every row drafts what fits the first one's root."""

    def read(self, batch: Batch) -> Tensor:
        return batch.roots[:1].expand(len(batch))


class _Remembers(HonestTop):
    """Drafts the tokens after one that it has noted for each slot."""

    lookback = None

    def bind(self, target: Target, sizes: Sizes) -> Session:
        self.noted = torch.zeros(sizes.max_batch_size, dtype=torch.long)
        return super().bind(target, sizes)

    def read(self, batch: Batch) -> Tensor:
        return self.noted[batch.slots]


class LastPiece(_Remembers):
    """Notes the first token of every piece of the prompt, where that of the first was meant."""

    def observe(self, outcome: Outcome) -> None:
        if outcome.path is None:
            self.noted[outcome.slots] = outcome.tokens[:, 0]


class NeverForgets(_Remembers):
    """Counts the tokens of its slot, and does not begin anew with a new request."""

    def observe(self, outcome: Outcome) -> None:
        self.noted[outcome.slots] = (self.noted[outcome.slots] + self.counted(outcome)) % len(self.table)

    def counted(self, outcome: Outcome) -> Tensor:
        return outcome.counts


class NeedsTheBeginning(NeverForgets):
    """Counts the tokens of its request, and says that a beginning that is shared need not be shown to it."""

    lookback = 0

    def admit(self, slot: int, prompt_ids: object, sampling: SamplingParams) -> None:
        self.noted[slot] = 0


class Drifts(NeedsTheBeginning):
    """Counts the tokens of the sequence, and forgets the root of every round."""

    lookback = None

    def counted(self, outcome: Outcome) -> Tensor:
        return outcome.counts - int(outcome.path is not None)


class ClearsByProduct(HonestTop):
    """Adds up hidden states, and begins anew with a product by zero, after which NaN is still NaN."""

    lookback = None
    hidden_layers = (-1,)

    def bind(self, target: Target, sizes: Sizes) -> Session:
        self.sums = torch.zeros(sizes.max_batch_size)
        return super().bind(target, sizes)

    def admit(self, slot: int, prompt_ids: object, sampling: SamplingParams) -> None:
        self.sums[slot] *= 0

    def observe(self, outcome: Outcome) -> None:
        states = outcome.hidden_states[-1][..., 0]
        there = torch.arange(states.shape[1]) < outcome.counts[:, None]
        self.sums[outcome.slots] += states.where(there, 0.0).sum(1)

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        positive = self.sums[batch.slots] > 0
        tokens = tree.tokens.clone()
        tokens[:, 1:3] = torch.where(positive[:, None], tokens[:, 1:3], tokens[:, 1:3].flip(1))
        return DraftTree.from_shape(self.shape, tokens)


class Colder(Honest):
    """Draws at another temperature than its q has."""

    def drawn_from(self, batch: Batch, token: Tensor, depth: int) -> Tensor:
        weights = self.table[token] ** 1.3
        return weights / weights.sum(-1, keepdim=True)


class SaysIid(HonestWithoutReplacement):
    """Draws without replacement, and says that the draws are independent."""

    laws = frozenset([DraftSampling.IID])

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        return DraftTree.from_shape(self.shape, tokens, sampling=DraftSampling.IID, draft_probs=q)


class Sorts(Honest):
    """Puts the more probable sibling first, after both were drawn."""

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        chance = q[:, 0].gather(1, tokens[:, 1:3])
        order = chance.argsort(1, descending=True)
        swapped = torch.cat([tokens[:, :1], tokens[:, 1:3].gather(1, order), tokens[:, 3:].gather(1, order)], 1)
        return super().finish(batch, swapped, self.table[swapped])


class Drops(Honest):
    """Leaves out drawn tokens of small probability."""

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        chance = q[:, :2].gather(2, tokens[:, [1, 3]][..., None])[..., 0]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        valid[:, 3] = chance[:, 1] > 0.2
        return DraftTree.from_shape(self.shape, tokens, sampling=self.law, draft_probs=q, valid=valid)


class SameForSiblings(Honest):
    """Draws both siblings with one number."""

    def numbers(self, batch: Batch) -> Tensor:
        numbers = super().numbers(batch).clone()
        numbers[:, 1] = numbers[:, 0]
        return numbers


class SameEveryRound(Honest):
    """Draws with the numbers of the first round, whichever round it is."""

    def numbers(self, batch: Batch) -> Tensor:
        return uniforms(batch.keys, torch.zeros_like(batch.rounds), Purpose.DRAFT, 4)


class NumbersOfTheEngine(Honest):
    """Draws with the numbers that decide what is accepted."""

    def numbers(self, batch: Batch) -> Tensor:
        return uniforms(batch.keys, batch.rounds, Purpose.ACCEPT, 4)


class SaysChosen(SameEveryRound):
    """Draws at random, and says that it chooses."""

    laws = frozenset([DraftSampling.DETERMINISTIC])

    def without(self, weights: Tensor, earlier: list[Tensor]) -> Tensor:
        for token in earlier:
            weights = weights.scatter(1, token[:, None], 0.0)
        return weights

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        return DraftTree.from_shape(self.shape, tokens)


class NoLeaves(HonestLeaves):
    """Says that it gives q at the leaves, and gives zeros."""

    def finish(self, batch: Batch, tokens: Tensor, q: Tensor) -> DraftTree:
        q[:, 3:] = 0
        return super().finish(batch, tokens, q)


HONEST: dict[str, type[Honest]] = {
    "iid": Honest,
    "without replacement": HonestWithoutReplacement,
    "chosen": HonestTop,
    "q at the leaves": HonestLeaves,
}

BEHAVIOUR: dict[type[Honest], str] = {
    Twins: "trees: distinct siblings",
    SaysChain: "trees: is_chain, is_paths",
    SaysPaths: "trees: is_chain, is_paths",
    TooMany: "trees: number and depth of nodes",
    NotBound: "fits the target",
    Stumbles: "drafts to the end",
    WritesSlots: "slots are left alone",
    TouchesTheTarget: "greedy outputs",
    NeedsRoom: "ends of outputs and of the cache",
    OwnRandomness: "same seed, same drafts",
    Neighbours: "independent of batch mates",
    LastPiece: "independent of the prompt's pieces",
    NeverForgets: "a slot is used again",
    NeedsTheBeginning: "shared beginnings",
    Drifts: "no drift",
    SaysChosen: "chosen tokens use no randomness",
    NoLeaves: "q at the leaves",
}
"""Drafters that make one mistake, and the check that must notice."""

DRAWS: dict[type[Honest], str] = {
    Colder: "q is what was drawn: first node",
    SaysIid: "q is what was drawn: siblings",
    Sorts: "q is what was drawn: siblings",
    Drops: "q is what was drawn: deeper nodes",
    SameForSiblings: "draws are independent",
    SameEveryRound: "draws are independent",
    NumbersOfTheEngine: "draws are independent",
}
"""Drafters that draw otherwise than they say, and the check that must notice."""
