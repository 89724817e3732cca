"""Lookahead decoding against the same played with lists and plain forwards, one node at a time."""

import pytest
import torch
from transformers import PreTrainedModel

from drafters.combined import _turned
from drafters.lookahead import LookaheadDrafter, _Request
from specdec import Drafter, Engine, SamplingParams, Target
from specdec.checks.reference import reference_decode
from tests.forwards import outcome_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier

MODEL = tiny_model(vocab_size=48)
PROMPT = [5, 9, 2, 7, 1]
TOKENS = 36


class Played:
    """Lookahead decoding of one request: a window of lists, a pool of lists, and a forward for every token.

    Args:
        mistake: Rows of a moved window stand under the column before theirs.
    """

    def __init__(self, model: PreTrainedModel, drafter: LookaheadDrafter, *, mistake: bool = False):
        self.model, self.drafter, self.mistake = model, drafter, mistake
        self.said: dict[tuple[int, ...], int] = {}

    def says(self, tokens: list[int]) -> int:
        """What the target says after a text."""
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
        """Put an n-gram into the pool."""
        kept = pool.setdefault(tokens[0], [])
        rest = tuple(tokens[1:])
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
        del kept[: -self.drafter.guesses]


def decoded(drafter: Drafter, prompts: list[list[int]]) -> list[list[int]]:
    """The accepted tokens of every round of every prompt, in one batch; outputs must be plain decoding's."""
    wanted = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    with shapes_unchecked(), Engine(
        Target(MODEL), drafter, RejectionVerifier(), max_batch_size=len(prompts), max_length=96
    ) as engine:  # fmt: skip
        done = engine.generate(prompts, wanted)
    for prompt, each in zip(prompts, done, strict=True):
        assert list(each.token_ids) == reference_decode(MODEL, prompt, wanted)
    return [[step.accepted for step in each.steps] for each in done]


CASES = [
    {"ngram": 3, "window": 2, "guesses": 1},
    {"ngram": 4, "window": 5, "guesses": 3},
    {"ngram": 5, "window": 3, "guesses": 2, "from_prompt": False},
]


@pytest.mark.parametrize("options", CASES)
def test_rounds_are_those_of_lists_and_plain_forwards(options: dict) -> None:
    drafter = LookaheadDrafter(**options)
    prompts = [PROMPT, [3, 3]]
    for prompt, rounds in zip(prompts, decoded(drafter, prompts), strict=True):
        wanted = Played(MODEL, drafter).accepted(prompt, TOKENS)
        assert rounds[: len(wanted)] == wanted


def test_a_window_whose_rows_stand_under_other_columns_is_noticed() -> None:
    drafter = LookaheadDrafter(**CASES[1], from_prompt=False)
    wanted = Played(MODEL, drafter, mistake=True).accepted(PROMPT, TOKENS)
    (rounds,) = decoded(drafter, [PROMPT])
    assert rounds[: len(wanted)] != wanted and sum(rounds) > 0


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
