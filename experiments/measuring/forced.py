"""Drafters on texts that are known to their end, without a target: *teacher forcing*.

A drafter is given a prompt, and then the answer, round by round. What it drafts is compared with the answer, and the
answer itself is what is emitted. So what is counted are the rounds of a greedy target that would answer exactly so.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.batch import Batch
from specdec.engine.slot_table import SlotTable
from specdec.interfaces import Drafter, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import HostOutcome, Outcome


class TextTarget(Target):
    """Stands in for the target where there is only text: a vocabulary, and no model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self.tokenizer, self.name = tokenizer, name
        self.vocab_size = max(len(tokenizer), tokenizer.vocab_size)
        self.eos_token_ids = frozenset()

    @property
    def device(self) -> torch.device:
        """Everything is on the CPU."""
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        """Refuse whatever only a model could answer."""
        raise ValueError(f"it asks the target for its {name}, and over texts there is no model")


class Successors:
    """The successors of every token in all texts so far: a stand-in for the target's likeliest tokens."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = defaultdict(Counter)

    def read(self, tokens: Sequence[int]) -> None:
        """Count all pairs of neighbours."""
        for token, following in pairwise(tokens):
            self._counts[token][following] += 1

    def likeliest(self, token: int, count: int, first: int | None = None) -> list[int]:
        """Return so many successors of a token, the most frequent first; -1 for those that are not known.

        ``first`` is one that is known to be the likeliest.
        """
        known = [] if first is None else [first]
        ranked = [following for following, _ in self._counts[token].most_common(count) if following != first]
        return (known + ranked + [-1] * count)[:count]


@dataclass(frozen=True)
class TextRounds:
    """The rounds of one text: the numbers of accepted tokens and of drafted nodes of every round."""

    accepted: list[int]
    nodes: list[int]

    @property
    def tokens(self) -> int:
        """The length of the answer."""
        return sum(self.accepted) + len(self.accepted)


class Forced:
    """A drafter that drafts for one text after another.

    A drafter that wants the target's likeliest tokens at every node (``Session.top_tokens``) gets the answer's own next
    token where a node is on the answer's path. Whatever else is asked for is what has followed that token most often in
    all texts so far, prompts included. A target knows more than that.

    Args:
        drafter: Any that asks for nothing of the target's model. It may have a model of its own.
        longest: The length of the longest text.

    Raises:
        ValueError: The drafter needs the target's model.
    """

    def __init__(self, drafter: Drafter, target: TextTarget, longest: int):
        name = type(drafter).__name__
        try:
            self.session = drafter.bind(target, Sizes(max_batch_size=1, max_length=longest))
        except ValueError as error:
            raise ValueError(f"{name} cannot draft for texts alone: {error}") from error
        if self.session.hidden_layers:
            raise ValueError(f"{name} reads hidden states of the target, and over texts there is no model")
        self.longest, self.vocab = longest, target.vocab_size
        self.successors = Successors()

    def replay(self, prompt: Sequence[int], answer: Sequence[int]) -> TextRounds:
        """Return the rounds in which an answer is emitted behind a prompt of at least one token."""
        session = self.session
        table = SlotTable(1, self.longest, self.vocab, torch.device("cpu"))
        wanted = SamplingParams(max_new_tokens=len(answer)).seeded(0)
        table.admit(0, list(prompt), wanted, speculate=True)
        table.prefilled(0, len(prompt) - 1)
        table.start(0)
        session.admit(0, prompt, wanted)
        self.successors.read(prompt)
        sequence, done = [*prompt, *answer], 0
        found = TextRounds([], [])
        if len(prompt) > 1:
            session.observe(_prefilled(table.rows(np.zeros(1, dtype=np.int64)), prompt))
        while done < len(answer):
            slots = table.rows(np.zeros(1, dtype=np.int64))
            session.prepare(slots)
            tree = session.propose(slots)
            path = walk(tree, answer[done:])
            count, root = len(path) + 1, len(prompt) + done - 1
            self.successors.read(sequence[root : root + count + 1])
            emitted, counts = np.array([sequence[root + 1 : root + count + 1]]), np.array([count])
            tokens = torch.tensor([sequence[root : root + count]])
            next_token = torch.from_numpy(emitted[:, -1])
            starts = slots.on_host.lengths.copy()
            outcome = Outcome(
                slots=slots.slots,
                starts=torch.from_numpy(starts),
                tokens=tokens,
                counts=torch.from_numpy(counts),
                next_tokens=next_token,
                path=torch.tensor([path], dtype=torch.long),
                node_tokens=tree.tokens,
                node_valid=tree.valid,
                top_tokens=self._said(tree, [0, *path], emitted[0].tolist()),
                host=HostOutcome(
                    slots=slots.on_host.slots,
                    starts=starts,
                    counts=counts,
                    path=np.array([path], dtype=np.int64),
                    emitted=emitted,
                    proposed_depth=np.array([tree.max_depth]),
                ),
            )
            found.accepted.append(len(path))
            found.nodes.append(int(tree.valid[0, 1:].sum()))
            table.advance(slots, tokens, torch.tensor([len(path)]), next_token, torch.tensor([True]))
            table.advance_host(slots, emitted, counts)
            session.observe(outcome)
            done += count
        session.release(0)
        return found

    def _said(self, tree: DraftTree, path: list[int], emitted: list[int]) -> Int[Tensor, "batch node rank"] | None:
        """Return the likeliest tokens behind every node, as the drafter wants them."""
        count = self.session.top_tokens
        if not count:
            return None
        following = dict(zip(path, emitted, strict=True))
        tokens = tree.tokens[0].tolist()
        said = [self.successors.likeliest(token, count, following.get(node)) for node, token in enumerate(tokens)]
        return torch.tensor([said])


def _prefilled(batch: Batch, prompt: Sequence[int]) -> Outcome:
    """The outcome of a prompt as an engine reports it: all of it but the root, in one piece."""
    starts, counts = np.zeros(1, dtype=np.int64), np.array([len(prompt) - 1])
    return Outcome(
        slots=batch.slots,
        starts=torch.from_numpy(starts),
        tokens=torch.tensor([prompt[:-1]]),
        counts=torch.from_numpy(counts),
        next_tokens=torch.tensor(prompt[-1:]),
        host=HostOutcome(slots=batch.on_host.slots, starts=starts, counts=counts),
    )


def walk(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """Return the nodes that go on like the answer, and leaves its last token to the target."""
    nodes = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.valid[0].tolist(), strict=True))
    path, at = [], 0
    for token in answer[:-1]:
        found = [node for node, (above, own, valid) in enumerate(nodes) if valid and above == at and own == token]
        if not found:
            break
        at = found[0]
        path.append(at)
    return path
