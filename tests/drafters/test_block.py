"""Block drafters: trees over what the head says."""

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead
from specdec.batch import Batch
from specdec.drafting.builders import ExpansionTree
from specdec.drafting.scored import ScoredSession
from specdec.engine.engine import Engine
from specdec.execution.frozen import weights_changed
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Outcome
from tests.components import markov_head
from tests.drafters.blocks import HIDDEN, VOCAB, dense_logits, head_for
from tests.forwards import drafted, outcome_of, slots_of
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.test_distribution import LEVEL, p_value
from verifiers.rejection import RejectionVerifier


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


def bound(target: Target, head: BlockHead, tree: Any = None, **options: Any) -> ScoredSession:
    return BlockDrafter(head, tree, **options).bind(target, Sizes(max_batch_size=3, max_length=40))


def committed(states: dict[int, Tensor], counts: list[int]) -> Outcome:
    shape = next(iter(states.values())).shape[:2]
    return outcome_of(torch.zeros(shape, dtype=torch.long), counts, hidden_states=states)


def states_for(target: Target, drafter: ScoredSession, rows: int = 2, positions: int = 6) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {layer: torch.randn(rows, positions, HIDDEN, generator=generator) for layer in drafter.hidden_layers}


def reference_for(target: Target, drafter: ScoredSession, states: dict[int, Tensor], row: int, root: int) -> Tensor:
    """Logits of depth 1, 2, … in a row, of a head without a Markov head."""
    features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)
    tokens = [root, *[VOCAB - 1] * (drafter.drafter.block_size - 1)]
    logits = dense_logits(drafter.drafter.head, target, features, tokens, causal=drafter.drafter.head.config.causal)
    return logits if drafter.drafter.head.config.shifted else logits[1:]


@pytest.mark.parametrize("shifted", [False, True])
def test_a_greedy_chain_takes_the_slots_best_tokens(target: Target, shifted: bool) -> None:
    drafter = bound(target, head_for(target, shifted=shifted))
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    tree = drafted(drafter, slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    for row, root in enumerate((8, 9)):
        wanted = reference_for(target, drafter, states, row, root).argmax(-1)
        assert tree.tokens[row].tolist() == [root, *wanted.tolist()]
    assert tree.max_depth == (5 if shifted else 4)


def best_first(log_probs: np.ndarray, nodes: int) -> set[tuple[int, ...]]:
    """DDTree by a heap over rank tuples, as its paper has it: the most probable paths, as tuples of tokens."""
    depth, vocab = log_probs.shape
    order = np.argsort(-log_probs, axis=1, kind="stable")
    value = lambda ranks: sum(log_probs[d, order[d, r]] for d, r in enumerate(ranks))  # noqa: E731
    heap, found = [(-value((0,)), (0,))], set()
    while len(found) < nodes:
        _, ranks = heapq.heappop(heap)
        found.add(tuple(int(order[d, r]) for d, r in enumerate(ranks)))
        if ranks[-1] + 1 < vocab:
            sibling = (*ranks[:-1], ranks[-1] + 1)
            heapq.heappush(heap, (-value(sibling), sibling))
        if len(ranks) < depth:
            heapq.heappush(heap, (-value((*ranks, 0)), (*ranks, 0)))
    return found


def paths_of(tree: Any, row: int) -> set[tuple[int, ...]]:
    found = set()
    for node in range(1, tree.width):
        path, at = [], node
        while at > 0:
            path.append(int(tree.tokens[row, at]))
            at = int(tree.parents[row, at])
        if tree.valid[row, node]:
            found.add(tuple(path[::-1]))
    return found


@pytest.mark.parametrize("nodes", [1, 12])
def test_trees_over_marginals_hold_the_best_paths_of_all(target: Target, nodes: int) -> None:
    """DDTree: the same nodes as best-first search, and as enumerating all paths of two levels."""
    drafter = bound(target, head_for(target), ExpansionTree(nodes, 4, nodes))
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    tree = drafted(drafter, slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40))
    for row, root in enumerate((8, 9)):
        log_probs = reference_for(target, drafter, states, row, root).log_softmax(-1).numpy()
        assert paths_of(tree, row) == best_first(log_probs, nodes)
        pairs = {(a, b): log_probs[0, a] + log_probs[1, b] for a, b in itertools.product(range(VOCAB), repeat=2)}
        kept = {path for path in paths_of(tree, row) if len(path) == 2}
        worst = min((pairs[path] for path in kept), default=np.inf)
        assert all(value <= worst + 1e-6 for path, value in pairs.items() if path not in kept)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_q_is_conditioned_on_the_branch(target: Target, kind: str) -> None:
    """Every node's q: the slot's logits and what the tokens above the node add to them."""
    head = head_for(target, shifted=True, markov_rank=6, markov_head_type=kind)
    shape = [(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0)]
    drafter = bound(target, head, shape, sampling="without_replacement")
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    params = [SamplingParams(temperature=1.0)] * 2
    tree = drafted(drafter, slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, params=params, max_length=40))
    assert (tree.law == int(DraftSampling.WITHOUT_REPLACEMENT)).all()
    bound_head = head.bound(target.model)
    for row in range(2):
        features = torch.cat([states[layer][row] for layer in drafter.hidden_layers], dim=-1)[None]
        cache = DynamicCache()
        with torch.no_grad():
            bound_head(features=features, past_key_values=cache)
            tokens = torch.tensor([[8 + row, *[VOCAB - 1] * 4]])
            output = bound_head(
                input_ids=tokens, attention_mask=torch.zeros(1, 1, 5, 11), past_key_values=cache,
                output_hidden_states=True,
            )  # fmt: skip
            parents = tree.parents[row].tolist()
            for node in {parent for parent in parents if parent >= 0}:
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.tokens[row, at]))
                    at = parents[at]
                depth = len(path)
                hidden, state, added = output.hidden_states[-1], None, torch.zeros(1)
                for place, token in enumerate(path[::-1]):
                    given = hidden[:, place] if head.markov_head.reads_hidden else None
                    added, state = head.markov_head(torch.tensor([token]), given, state)
                wanted = (output.logits[0, depth - 1] + added[0]).softmax(-1)
                torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-4, rtol=1e-3)


def test_confidence_is_known_before_a_token_is_drawn(target: Target) -> None:
    head = head_for(target, shifted=True, markov_rank=6, confidence=True)
    drafter = bound(target, head, [2, 1])
    states = states_for(target, drafter)
    drafter.observe(committed(states, [6, 6]))
    slots = slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    drafted(drafter, slots)
    scorer = drafter.scorer
    tokens = torch.tensor([[4, 5], [6, 7]])
    found = scorer.confidence(tokens, 1)
    weight, bias = head.confidence_head.proj.weight.double(), head.confidence_head.proj.bias.double()
    hidden = scorer._hidden[:, 1].double()
    with torch.no_grad():
        for row, column in itertools.product(range(2), range(2)):
            known = head.markov_head.markov_w1.weight[tokens[row, column]].double()
            wanted = torch.sigmoid(weight @ torch.cat([hidden[row], known]) + bias)
            torch.testing.assert_close(found[row, column].double(), wanted[0], atol=1e-5, rtol=1e-5)
    plain = bound(target, head_for(target))
    plain.observe(committed(states, [6, 6]))
    drafted(plain, slots)
    assert plain.scorer.confidence(tokens, 1) is None


def test_the_context_is_what_one_forward_of_the_whole_text_gives() -> None:
    """After recorded rounds that accepted more and less, in chunks and in slots that were used before."""
    model = tiny_model("llama", vocab_size=VOCAB, layers=2)
    head = markov_head(model)
    drafter = BlockDrafter(head, [2, 1, 1])
    engine = Engine(
        Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=48, prefill_chunk=5,
        recording="rounds",
    )  # fmt: skip
    prompts = [[3] * 9, [7, 8, 9], [11], [5, 6] * 6]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=16, temperature=0.5))
    assert sum(step.accepted for output in outputs for step in output.steps) > 5
    stream = engine.stream([[3, 4] * 4, [9] * 3], SamplingParams(max_new_tokens=16, temperature=0.5))
    tokens: dict[int, list[int]] = {}
    for step in itertools.islice(stream, 8):
        tokens.setdefault(step.request, []).extend(step.token_ids)
    cache, bound_head = engine.session.models[0].cache, head.bound(model)
    first = min(tokens)
    for slot, prompt in enumerate([[3, 4] * 4, [9] * 3]):
        text = prompt + tokens[first + slot]
        with torch.no_grad():
            states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            fresh = bound_head(features=states[1]).past_key_values
        keys, values = (tensor[0, slot, : len(text) - 1].transpose(0, 1) for tensor in cache.tensors)
        torch.testing.assert_close(keys, fresh.layers[0].keys[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, fresh.layers[0].values[0], atol=1e-4, rtol=1e-4)


class SaysTheMarginals(Wrapped):
    """Mutant: draws with the Markov head, and says q without it."""

    def propose(self, batch: Batch) -> DraftTree:
        tree = super().propose(batch)
        if tree.draft_probs is not None:
            depth = tree.width - 1
            tree.draft_probs[:, :depth] = self.inner.scorer._logits[:, :depth].softmax(-1)  # type: ignore[attr-defined]
        return tree


def test_q_without_the_markov_head_s_part_is_rejected() -> None:
    model = tiny_model("llama", vocab_size=5, scale=1.5, layers=2)
    drafter = Wrapping(BlockDrafter(markov_head(model), 3), SaysTheMarginals)
    assert p_value(model, drafter, RejectionVerifier(), SamplingParams(temperature=1.0), samples=1000) < LEVEL


def test_a_root_that_the_head_s_embeddings_lack_is_drafted_for(target: Target) -> None:
    """A target's logits may be padded: drafts are bad then, and nothing fails."""
    head = head_for(target, owns_embeddings=True, owns_output=True, vocab_size=VOCAB - 4, mask_token_id=5)
    drafter = bound(target, head)
    drafter.observe(committed(states_for(target, drafter), [6, 6]))
    slots = slots_of([[1] * 6 + [VOCAB - 1], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    assert drafted(drafter, slots).tokens[:, 1:].max() < VOCAB - 4


def test_the_head_in_training_is_the_one_that_drafts(target: Target) -> None:
    head = head_for(target)
    drafter = bound(target, head)
    drafter.observe(committed(states_for(target, drafter), [6, 6]))
    slots = slots_of([[1] * 6 + [8], [2] * 6 + [9]], vocab_size=VOCAB, max_length=40)
    before = drafted(drafter, slots).tokens.clone()
    with torch.no_grad():
        head.layers[1].mlp.down_proj.weight.neg_()
    with pytest.raises(ValueError, match="weights_changed"):  # not followed silently
        drafted(drafter, slots)
    weights_changed()
    assert not torch.equal(drafted(drafter, slots).tokens, before)
    assert all(parameter.requires_grad for parameter in head.parameters())
