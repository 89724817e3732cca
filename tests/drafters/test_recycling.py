"""Token recycling: how the table is filled and unrolled, against plain Python."""

import random

import pytest
import torch

from drafters.recycling import RecyclingSession, TokenRecyclingDrafter
from specdec import SamplingParams, Sizes, Target, TreeShape
from tests.forwards import outcome_of, slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

VOCAB = 16
TARGET = Target(tiny_model(vocab_size=VOCAB, layers=1))
SHAPE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def bound(shape=SHAPE, slots: int = 2, **options: object) -> RecyclingSession:
    return TokenRecyclingDrafter(shape, **options).bind(TARGET, Sizes(max_batch_size=slots, max_length=64))


def tell(drafter: RecyclingSession, nodes: list[list[int]], told: list[bool], valid: list[list[bool]]) -> torch.Tensor:
    """Let a round of made-up successors be followed; returns them."""
    batch, width = len(nodes), len(nodes[0])
    generator = torch.Generator().manual_seed(len(nodes[0]))
    orders = torch.rand(batch, width, VOCAB, generator=generator).argsort(-1)[..., : drafter.top_tokens]
    slots = torch.arange(batch)
    drafter.observe(
        outcome_of(
            slots[:, None], [*map(int, told)], path=[[-1]] * batch, node_tokens=torch.tensor(nodes),
            top_tokens=orders, node_valid=torch.tensor(valid),
        )
    )  # fmt: skip
    return orders


@pytest.mark.parametrize("scope", ["request", "shared"])
def test_a_tree_is_the_table_unrolled(scope: str) -> None:
    drafter = bound(scope=scope)
    every = [[True] * 4] * 2
    found = tell(drafter, [[3, 4, 5, 4], [6, 7, 7, 8]], [True] * 2, every)  # of equal tokens the last one counts
    table = {
        slot: {token: found[slot, node].tolist() for node, token in enumerate(tokens)}
        for slot, tokens in enumerate([[3, 4, 5, 4], [6, 7, 7, 8]])
    }
    if scope == "shared":
        table = dict.fromkeys(table, table[0] | table[1])
    shape = TreeShape.of(SHAPE)
    sequences = [[1, 3], [1, 7]]
    with shapes_unchecked():
        tree = drafter.propose(slots_of(sequences))
    for row, sequence in enumerate(sequences):
        tokens: list[int | None] = [sequence[-1]]
        for node in range(1, shape.num_nodes + 1):
            above = tokens[shape.parents[node]]
            tokens.append(table[row][above][shape.ranks[node]] if above in table[row] else None)
        assert tree.valid[row].tolist() == [token is not None for token in tokens]
        drafted = [token for token in tokens if token is not None]
        assert tree.tokens[row][tree.valid[row]].tolist() == drafted
        assert (tree.tokens[row][~tree.valid[row]] == sequence[-1]).all()


def successors(drafter: RecyclingSession, tokens: list[int]) -> list[list[int]]:
    """What each row drafts behind such a root; empty where nothing is known."""
    with shapes_unchecked():
        tree = drafter.propose(slots_of([[1, token] for token in tokens]))
    return [row[1:][known[1:]].tolist() for row, known in zip(tree.tokens, tree.valid, strict=True)]


@pytest.mark.parametrize(("scope", "slots"), [("request", 3), ("shared", 3), ("shared", 1)])
@pytest.mark.parametrize("seed", range(6))
def test_tables_are_those_that_are_written_node_by_node(scope: str, slots: int, seed: int) -> None:
    """Random rounds and admissions, against dictionaries that every node is written into in its order, as upstream.

    Invalid nodes carry the root's token, and rows that are not told write nothing. A request looks up its own table
    first, which begins empty, and behind it the shared one.
    """
    rng = random.Random(seed)
    drafter = bound([2], slots=slots, scope=scope)
    own: list[dict[int, list[int]]] = [{} for _ in range(slots)]
    shared: dict[int, list[int]] = {}
    for _ in range(6):
        if rng.random() < 0.3:
            slot = rng.randrange(slots)
            drafter.admit(slot, [1, 3], SamplingParams())
            own[slot].clear()
        width = rng.randint(1, 9)
        nodes = [[rng.randrange(4) for _ in range(width)] for _ in range(slots)]
        valid = [[True, *(rng.random() < 0.7 for _ in range(width - 1))] for _ in range(slots)]
        for row, drawn in zip(nodes, valid, strict=True):
            row[:] = [token if is_valid else row[0] for token, is_valid in zip(row, drawn, strict=True)]
        told = [rng.random() < 0.8 for _ in range(slots)]
        said = tell(drafter, nodes, told, valid)
        for row in range(slots):
            for node in range(width):
                if told[row] and valid[row][node]:
                    own[row][nodes[row][node]] = shared[nodes[row][node]] = said[row, node].tolist()
        for token in range(4):
            behind = shared if scope == "shared" else {}
            wanted = [table.get(token, behind.get(token, [])) for table in own]
            assert successors(drafter, [token] * slots) == wanted
