"""Tables of p and q that stand for a target and a drafter: one distribution per prefix, over a tiny vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.wellformed import describe, distribution_flaw

ROW_KINDS = ("dense", "zeros", "disjoint", "equal", "one_hot", "exhausted")
"""The kinds of rows that ``Tables.random`` makes."""
_TOLERANCE = 1e-6  # how far a row's sum may be from 1: tables may come from float32


@dataclass(frozen=True)
class Tables:
    """The next-token distributions of a target and a drafter, after every prefix up to some length.

    ``p[d][i]`` follows the prefix of length d whose tokens, read as digits in base ``vocab``, make the number i; ``q``
    is in the same order, and None if drafts are ``DETERMINISTIC`` and made elsewhere.

    Raises:
        ValueError: A row is not a distribution, or a level has the wrong number of rows; says which.
    """

    p: tuple[Float[Tensor, "_ vocab"], ...]
    q: tuple[Float[Tensor, "_ vocab"], ...] | None

    def __post_init__(self) -> None:
        for name, levels in (("p", self.p), ("q", self.q or ())):
            for depth, level in enumerate(levels):
                if len(level) != self.vocab**depth:
                    raise ValueError(
                        f"{name} has {len(level)} rows for prefixes of length {depth}: give {self.vocab**depth}, one "
                        f"per prefix over {self.vocab} tokens"
                    )
                for row in distribution_flaw(level, _TOLERANCE).nonzero()[:, 0].tolist():
                    prefix = tuple(row // self.vocab**place % self.vocab for place in reversed(range(depth)))
                    raise ValueError(f"{name} after {prefix} {describe(level[row])}")

    @property
    def vocab(self) -> int:
        return self.p[0].shape[1]

    @property
    def drafter(self) -> tuple[Tensor, ...]:
        if self.q is None:
            raise ValueError("the tables have no q, so there is nothing to draft from: give q for every prefix")
        return self.q

    @property
    def depth(self) -> int:
        return len(self.p) - 1

    @classmethod
    def random(cls, vocab: int, depth: int, *, seed: int, kinds: Sequence[str] = ("dense",)) -> "Tables":
        """Return random tables; the kinds of rows take turns over the prefixes of up to ``depth`` tokens.

        Args:
            kinds: ``dense``: all probabilities positive; ``zeros``: one zero in p and one in q; ``disjoint``: no token
                has a positive probability in both; ``equal``: q is p; ``one_hot``: p has a single token; ``exhausted``:
                q has two tokens, so a third draw without replacement finds none.
        """
        unknown = [kind for kind in kinds if kind not in ROW_KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds of rows {tuple(kinds)}: choose from {', '.join(ROW_KINDS)}")
        generator = torch.Generator().manual_seed(seed)

        def row() -> Tensor:
            return torch.rand(vocab, generator=generator, dtype=torch.float64).log().neg() ** 2

        def pair(kind: str) -> tuple[Tensor, Tensor]:
            p, q, order = row(), row(), torch.randperm(vocab, generator=generator)
            if vocab > 1 and kind == "zeros":
                p[order[0]] = 0
                q[order[-1]] = 0
            elif vocab > 1 and kind == "disjoint":
                p[order[: vocab // 2]] = 0
                q[order[vocab // 2 :]] = 0
            elif kind == "equal":
                q = p.clone()
            elif kind == "one_hot":
                p[order[1:]] = 0
            elif kind == "exhausted":
                q[order[2:]] = 0
            return p / p.sum(), q / q.sum()

        levels = []
        for length in range(depth + 1):
            rows = [pair(kinds[(index + length) % len(kinds)]) for index in range(vocab**length)]
            levels.append((torch.stack([p for p, _ in rows]), torch.stack([q for _, q in rows])))
        return cls(tuple(p for p, _ in levels), tuple(q for _, q in levels))

    def tempered(self, temperature: float) -> "Tables":
        def temper(levels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple((level.log() / temperature).softmax(-1) for level in levels)

        return Tables(temper(self.p), None if self.q is None else temper(self.q))

    def stated(self, verifier: Verifier) -> "Tables":
        """Return tables whose p is the law that a verifier's output should follow."""
        if self.q is None:
            return self
        return Tables(tuple(verifier.stated_law(p, q) for p, q in zip(self.p, self.q, strict=True)), self.q)

    def joint(self, length: int) -> Tensor:
        """Return the target's joint distribution of the next ``length`` tokens, flat."""
        joint = torch.ones(1, dtype=torch.float64)
        for level in self.p[:length]:
            joint = (joint[:, None] * level).flatten()
        return joint
