"""Look-ups in the text so far and in what the target said, against the same in plain Python."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from drafters import LookaheadDrafter, NGramDrafter, TokenRecyclingDrafter
from drafters.combined import _turned
from drafters.lookahead import _Request
from specdec import DraftTree, Engine, SamplingParams, Sizes, Target, TreeShape
from tests.forwards import inner_paths, node_paths, outcome_of, slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier


def reference(sequence: list[int], drafter: NGramDrafter, max_depth: int = 100) -> list[list[int]]:
    """A row's branches, by the words of the drafter's docstring."""
    depth = min(drafter.max_draft_tokens, max_depth)
    continuations = []
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        if n >= len(sequence):
            continue
        matches = [e for e in range(n - 1, len(sequence) - 1) if sequence[e - n + 1 : e + 1] == sequence[-n:]]
        for end in matches[::-1][: drafter.considered]:
            continuation = sequence[end + 1 : end + 1 + depth]
            if continuation and continuation not in continuations:
                continuations.append(continuation)
    branches: list[list[int]] = []
    for continuation in continuations:
        if len(branches) == drafter.branches:
            break
        if any(branch[: len(continuation)] == continuation for branch in branches):
            continue
        begun = [other for other in continuations if other[: len(continuation)] == continuation]
        branches.append(max(begun, key=len))  # the first of the longest
    return branches


def leaves(tree: DraftTree, row: int) -> list[list[int]]:
    """The branches of one row, in the order of their last nodes."""
    inner = inner_paths(tree, row)
    return [path[1:] for node, path in node_paths(tree, row).items() if node and node not in inner]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_agrees_with_the_reference_on_ragged_batches(data: st.DataObject) -> None:
    draw = data.draw
    batch = draw(st.integers(1, 5))
    token = st.integers(0, draw(st.integers(0, 3)))
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=batch, max_size=batch))
    min_ngram = draw(st.integers(1, 3))
    drafter = NGramDrafter(
        draw(st.integers(1, 6)),
        branches=draw(st.integers(1, 4)),
        min_ngram=min_ngram,
        max_ngram=draw(st.integers(min_ngram, 5)),
    )
    max_depth = draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
    drafting = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    tree = drafter.propose(slots_of(sequences, max_depth=max_depth, drafting=drafting))
    wanted = [
        reference(sequence, drafter, depth) if wants else []
        for sequence, depth, wants in zip(sequences, max_depth, drafting, strict=True)
    ]
    assert [leaves(tree, row) for row in range(batch)] == wanted
    prefixes = [{tuple(b[:i]) for b in branches for i in range(1, len(b) + 1)} for branches in wanted]
    assert tree.width == 1 + max(len(p) for p in prefixes), "as few columns as the fullest row needs"
    assert tree.max_depth == max((len(b) for branches in wanted for b in branches), default=0)
    fanouts = [sum(p[:-1] == above for p in row) for row in prefixes for above in [(), *row]]
    assert tree.max_children == max(fanouts)


VOCAB, SLOTS = 16, 3
TARGET = Target(tiny_model(vocab_size=VOCAB, layers=1))
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def unrolled(table: dict[int, list[int]], root: int) -> list[int | None]:
    """The tokens of ``SHAPE``, node by node, from what follows every token; None where nothing is known."""
    tokens: list[int | None] = [root]
    for parent, rank in zip(SHAPE.parents[1:], SHAPE.ranks[1:], strict=True):
        above = tokens[parent]
        tokens.append(table[above][rank] if above in table else None)
    return tokens


@pytest.mark.parametrize("scope", ["request", "shared"])
@pytest.mark.parametrize("seed", range(4))
def test_recycled_trees_are_unrolled_from_tables_that_are_written_node_by_node(scope: str, seed: int) -> None:
    """Random rounds and admissions, against dictionaries that every node is written into in its order, as upstream.

    Invalid nodes carry the root's token, and rows that are not told write nothing. A request looks up its own table
    first, which begins empty, and behind it the shared one.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drafter = TokenRecyclingDrafter(SHAPE, scope=scope).bind(TARGET, Sizes(max_batch_size=SLOTS, max_length=64))
    own: list[dict[int, list[int]]] = [{} for _ in range(SLOTS)]
    shared: dict[int, list[int]] = {}
    for _ in range(6):
        if rng.random() < 0.3:
            slot = rng.randrange(SLOTS)
            drafter.admit(slot, [1, 3], SamplingParams())
            own[slot].clear()
        width = rng.randint(1, 9)
        valid = [[True, *(rng.random() < 0.7 for _ in range(width - 1))] for _ in range(SLOTS)]
        nodes = []
        for marks in valid:
            root = rng.randrange(4)
            nodes.append([root, *(rng.randrange(4) if mark else root for mark in marks[1:])])
        told = [rng.random() < 0.8 for _ in range(SLOTS)]
        said = torch.rand(SLOTS, width, VOCAB, generator=generator).argsort(-1)[..., : drafter.top_tokens]
        given = {"node_tokens": torch.tensor(nodes), "node_valid": torch.tensor(valid), "top_tokens": said}
        drafter.observe(outcome_of([[0]] * SLOTS, [*map(int, told)], path=[[-1]] * SLOTS, **given))
        for row in range(SLOTS):
            for node in range(width):
                if told[row] and valid[row][node]:
                    own[row][nodes[row][node]] = shared[nodes[row][node]] = said[row, node].tolist()
        for token in range(4):
            behind = shared if scope == "shared" else {}
            with shapes_unchecked():
                tree = drafter.propose(slots_of([[1, token]] * SLOTS))
            for row, table in enumerate(own):
                wanted = unrolled(behind | table, token)
                assert tree.valid[row].tolist() == [each is not None for each in wanted]
                assert tree.tokens[row].tolist() == [token if each is None else each for each in wanted]


MODEL = tiny_model(vocab_size=48)
PROMPT = [5, 9, 2, 7, 1]
TOKENS = 36


class Played:
    """One request decoded with lists and a forward per token; by mistake, rows of a moved window are a column off."""

    def __init__(self, model: PreTrainedModel, drafter: LookaheadDrafter, *, mistake: bool = False):
        self.model, self.drafter, self.mistake = model, drafter, mistake
        self.said: dict[tuple[int, ...], int] = {}

    def says(self, tokens: list[int]) -> int:
        if tuple(tokens) not in self.said:
            with torch.no_grad():
                self.said[tuple(tokens)] = int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())
        return self.said[tuple(tokens)]

    def accepted(self, prompt: list[int], count: int) -> list[int]:
        """The number of accepted tokens of every round, up to where the window has no room before the end."""
        ngram, text, rounds = self.drafter.ngram, list(prompt), []
        window, pool, read = [_Request(self.drafter, prompt).rows[0]], {}, 0
        while count - (len(text) - len(prompt)) > self.drafter.max_depth + 1:
            root = text[-1]
            if self.drafter.from_prompt:
                for start in range(len(text) - ngram + 1):
                    if start + ngram > read:
                        self.remember(pool, text[start : start + ngram])
                read = len(text)
            drafts = list(pool.get(root, []))
            columns = [[root], *([root, token] for token in window[0])]  # every column's path, down its rows
            for column in range(1, len(columns)):
                columns[column] = [root, *window[0][:column]]
            for row in window[1:]:
                columns = [[*path, token] for path, token in zip(columns, row, strict=True)]
            new = [self.says([*text[:-1], *path]) for path in columns]
            going, taken = list(text), 0
            while any(draft[: taken + 1] == (*going[len(text) :], self.says(going)) for draft in drafts):
                going.append(self.says(going))
                taken += 1
            if len(window) < ngram - 1:
                window = [*(row[1:] for row in window), new[:-1] if self.mistake else new[1:]]
            else:
                for column, first in enumerate([root, *window[0]]):
                    self.remember(pool, [first, *(row[column] for row in window[1:]), new[column]])
                window = [window[1][1:], *window[2:], new]
            text = [*going, self.says(going)]
            rounds.append(taken)
        return rounds

    def remember(self, pool: dict[int, list[tuple[int, ...]]], tokens: list[int]) -> None:
        kept = pool.setdefault(tokens[0], [])
        rest = tuple(tokens[1:])
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
        del kept[: -self.drafter.guesses]


CASES = [
    {"ngram": 3, "window": 2, "guesses": 1},
    {"ngram": 4, "window": 5, "guesses": 3, "from_prompt": False},
    {"ngram": 5, "window": 3, "guesses": 2},
]


@pytest.mark.parametrize("options", CASES)
def test_rounds_of_lookahead_are_those_of_lists_and_plain_forwards(options: dict) -> None:
    drafter, prompts = LookaheadDrafter(**options), [PROMPT, [3, 3]]
    engine = Engine(Target(MODEL), drafter, RejectionVerifier(), max_batch_size=2, max_length=96)
    with shapes_unchecked():
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    wanted = [Played(MODEL, drafter).accepted(prompt, TOKENS) for prompt in prompts]
    for rounds, output in zip(wanted, outputs, strict=True):
        assert [step.accepted for step in output.steps][: len(rounds)] == rounds
    if options is CASES[1]:
        assert Played(MODEL, drafter, mistake=True).accepted(PROMPT, TOKENS) != wanted[0]


def test_merged_with_another_drafter_it_reads_its_own_nodes_where_they_were() -> None:
    """In a merged tree the other drafter's nodes come first: here 1 and 2 of the target's answers 0 to 4."""
    said = torch.tensor([[[10], [11], [12], [13], [14]]])
    outcome = outcome_of(
        [[7]], [1], path=[[-1]], node_tokens=torch.tensor([[7, 1, 2, 3, 4]]), top_tokens=said,
        node_valid=torch.tensor([[True, True, True, False, True]]),
    )  # fmt: skip
    turned = _turned(outcome, 2)
    assert turned.node_tokens.tolist() == [[7, 3, 4, 1, 2]]
    assert turned.node_valid.tolist() == [[True, False, True, True, True]]
    assert turned.top_tokens[..., 0].tolist() == [[10, 13, 14, 11, 12]]
