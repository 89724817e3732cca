"""What a drafter proposed for one request, apart from the batch that the request was in."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from specdec.tree import DraftTree
from specdec.types import DraftSampling

DRAWN = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
"""The laws of tokens that are drawn from q."""


@dataclass(frozen=True, eq=False)
class Draft:
    """The valid nodes of one row.

    Attributes:
        tokens: Their tokens, the root first.
        parents: Their parents, as indices into this draft.
        laws: How each was drawn.
        draft_probs: q after the first of them; None if the tree has none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    laws: tuple[int, ...]
    draft_probs: Float[Tensor, "node vocab"] | None

    @classmethod
    def of(cls, tree: DraftTree, row: int, *, rows_of_q: int | None = None) -> "Draft":
        """Returns a row of a tree.

        Args:
            tree: The tree.
            row: The row.
            rows_of_q: After how many nodes q is kept, which takes memory; None for all.
        """
        nodes: Int[Tensor, " node"] = tree.valid[row].nonzero()[:, 0]
        place = {node: index for index, node in enumerate(nodes.tolist())} | {-1: -1}
        return cls(
            tokens=tuple(tree.tokens[row, nodes].tolist()),
            parents=tuple(place[parent] for parent in tree.parents[row, nodes].tolist()),
            laws=(0, *tree.law[row, nodes].tolist()[1:]),
            draft_probs=None if tree.draft_probs is None else tree.draft_probs[row, nodes[:rows_of_q]].clone(),
        )

    def difference(self, other: "Draft", tolerance: float) -> str | None:
        """Returns how two drafts differ, in words; None if they are equal, q within a tolerance.

        Args:
            other: The other draft.
            tolerance: The largest difference between two entries of q that counts as rounding.
        """
        if self.tokens != other.tokens or self.parents != other.parents or self.laws != other.laws:
            return f"{self.nodes} instead of {other.nodes}"
        mine, theirs = self.draft_probs, other.draft_probs
        read = sorted({self.parents[node] for node in range(1, len(self.tokens)) if self.laws[node] in DRAWN})
        if not read or mine is None or theirs is None:
            return None
        read = [node for node in read if node < len(mine)]
        apart = float((mine[read] - theirs[read]).abs().max())
        return f"q differs by up to {apart:.2g} after the same tokens" if apart > tolerance else None

    @property
    def nodes(self) -> str:
        """The drafted tokens, each with its parent's index if that is not the node before."""
        drafted = [
            str(token) if parent == node - 1 else f"{token} under node {parent}"
            for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
            if node > 0
        ]
        return f"[{', '.join(drafted[:8])}{', …' if len(drafted) > 8 else ''}]" if drafted else "no tokens"
