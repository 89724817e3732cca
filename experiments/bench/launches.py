"""How many operations does a rule launch per round? ``python -m experiments.bench launches rules=[block]``.

On a GPU every operation is at least one kernel launch, and costs a few microseconds however small its tensors are. They
are counted on a CPU, where the same code runs: the number depends on the shape of the tree, not on lengths, values, the
vocabulary or the batch. Counted is ``accept``: both laws and both draws. Trees with
parents of their own in every row, as n-gram drafters make them, take more, because no table can be made beforehand.
"""

from dataclasses import dataclass

import torch

from experiments.bench.options import option, read_options
from experiments.bench.rules import NAMES, make_rules
from experiments.reporting import terminal
from experiments.reporting.table import Cell, Column, Table
from specdec.acceptance import accept
from specdec.execution.counting import Work, counted
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

SHAPES = {
    "chain of 4": TreeShape.chain(4),
    "3 x 2 x 1": TreeShape.branching(3, 2, 1),
    "12 nodes": TreeShape.from_paths(
        [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0,) * 4, (0,) * 5]
    ),
    "8 paths of 8": TreeShape.branching(8, *[1] * 7),
}
"""Trees by name. That of 12 nodes has 4 children at its root, is 5 deep, and is uneven, as trained tree shapes are."""
LAWS = (DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
VOCAB = 32


def drafted(
    shape: TreeShape, law: DraftSampling, *, per_row: bool = False, batch: int = 3
) -> tuple[DraftTree, torch.Tensor]:
    """Random drafts and p.

    Args:
        shape: The shape of every row's tree.
        law: How every node was drawn.
        per_row: Whether every row has parents of its own, so that the host does not know the shape.
        batch: The number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    nodes = shape.num_nodes + 1
    p, q = torch.rand(2, batch, nodes, VOCAB, generator=generator).softmax(-1)
    tokens = torch.randint(0, VOCAB, (batch, nodes), generator=generator)
    draft_probs = None if law is DraftSampling.DETERMINISTIC else q
    # Without replacement, q may run out of tokens: drafters say which siblings exist.
    marked = law is DraftSampling.WITHOUT_REPLACEMENT and not shape.is_chain
    valid = torch.ones_like(tokens, dtype=torch.bool) if marked else None
    if not per_row:
        return DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=draft_probs, valid=valid), p
    tree = DraftTree.build(
        tokens,
        torch.tensor([shape.parents]).repeat(batch, 1),
        valid=valid,
        sampling=law,
        draft_probs=draft_probs,
        max_depth=shape.max_depth,
        max_children=shape.max_children,
    )
    _ = tree.depth, tree.ancestors  # the verify forward has made them
    return tree, p


def work_of(rule: Verifier, tree: DraftTree, p: torch.Tensor) -> Work:
    """The operations of one acceptance, not in inference mode, which would hide some of them."""
    uniforms = torch.full((len(p), 2), 0.5, dtype=torch.float64)
    with torch.no_grad(), counted() as work:
        accept(rule, tree, p, uniforms)
    return work


def fits(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    """Whether a rule takes such drafts."""
    return law in rule.samplings and (shape.is_chain or not rule.chain_only) and (shape.is_paths or not rule.paths_only)


@dataclass(frozen=True)
class Options:
    """The command line."""

    rules: tuple[str, ...] = option(
        tuple(name for name in NAMES if name != "transport"), "names of conf/verifier", choices=NAMES
    )


def main() -> None:
    """Count, and print one table."""
    options = read_options(Options, __doc__)
    columns = (Column("rule", "left"), Column("drafts", "left"), *[Column(name) for name in SHAPES])
    table = Table((*columns, *[Column(f"{name},\nper row") for name in SHAPES]), "Operations per accepted round")
    for name, rule in make_rules(options.rules).items():
        for law in LAWS:
            if law not in rule.samplings:
                continue
            texts = [name, law.name.lower().replace("_", " ")]
            for per_row in (False, True):
                for shape in SHAPES.values():
                    if not fits(rule, shape, law):
                        texts.append("-")
                        continue
                    work_of(rule, *drafted(shape, law, per_row=per_row))  # tables of a shape are made once
                    texts.append(str(work_of(rule, *drafted(shape, law, per_row=per_row)).launches))
            table.add(*[Cell(text) for text in texts])
    terminal.console(160).print(terminal.render(table))


if __name__ == "__main__":
    main()
