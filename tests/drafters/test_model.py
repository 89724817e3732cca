"""A small model's drafts, beyond what the generic tests see: coupled ones, and q at the leaves."""

from typing import Any

import pytest
import torch

from drafters.model import ModelDrafter
from specdec import DraftSampling, DraftTree, SamplingParams, Sizes, Target
from specdec.random import request_key, shared_noise
from specdec.sampling import adjust, distribution
from tests.components import perturbed
from tests.forwards import drafted, slots_of

VOCAB = 24
PROMPTS = [[1, 2, 3, 1, 2], [5, 6, 5]]
SHAPE = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
SAMPLED = SamplingParams(temperature=0.9, seed=3)
GREEDY = SamplingParams(seed=3)


def proposed(drafter: ModelDrafter, model, params: list[SamplingParams], *, leaf_probs: bool = False) -> DraftTree:
    """The drafts behind prompts that nobody has prefilled yet: the session catches up with them."""
    session = drafter.bind(Target(model), Sizes(max_batch_size=2, max_length=32, leaf_probs=leaf_probs))
    for slot, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True)):
        session.admit(slot, prompt, sampling)
        session.scorer._last_token[slot], session.scorer._known[slot] = prompt[-2], 0
    return drafted(session, slots_of(PROMPTS, vocab_size=VOCAB, params=params, max_depth=9, max_length=32))


@torch.inference_mode()
def law_after(model, sequence: list[int], sampling: SamplingParams) -> torch.Tensor:
    """What a plain forward draws from."""
    state = slots_of([sequence], vocab_size=VOCAB, params=[sampling]).sampling
    tokens = torch.tensor([sequence])
    return distribution(adjust(model(tokens).logits[:, -1:], state, tokens[:, None, -1:]), state)[0, 0]


def path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Tokens from the root's child to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens


def test_coupled_children_are_the_first_in_the_race(model) -> None:
    twin = perturbed(model, 0.3)
    tree = proposed(ModelDrafter(twin, SHAPE, sampling="coupled"), model, [SAMPLED, SAMPLED])
    assert tree.draft_probs is None
    assert (tree.law == DraftSampling.COUPLED).all()
    for row, prompt in enumerate(PROMPTS):
        for node in (0, 1, 2):
            children = [child for child in range(6) if tree.parents[row, child] == node]
            above = path(tree, row, node)
            position = torch.tensor([[len(prompt) + len(above)]])
            noise = shared_noise(torch.tensor([request_key(3, row)]), position, VOCAB)[0, 0]
            q = law_after(twin, prompt + above, SAMPLED)
            expected = (q.log() - noise.log()).topk(len(children)).indices
            assert tree.tokens[row, children].tolist() == expected.tolist()


def test_greedy_rows_beside_coupled_ones_get_the_top_k(model) -> None:
    twin = perturbed(model, 0.3)
    drafter = ModelDrafter(twin, SHAPE, sampling="coupled")
    tree = proposed(drafter, model, [GREEDY, SAMPLED])
    assert tree.law[:, 1:].tolist() == [[DraftSampling.DETERMINISTIC] * 5, [DraftSampling.COUPLED] * 5]
    with torch.inference_mode():
        top = twin(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(2).indices
    assert tree.tokens[0, 1:3].tolist() == top.tolist()
    assert tree.valid.all()


@pytest.mark.parametrize("shape", [3, SHAPE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["iid", "without_replacement"])
def test_q_stands_at_every_node_with_leaf_probs(model, sampling: str, shape: Any) -> None:
    """A greedy row has q at temperature 1; the tokens are the same as without q at the leaves."""
    twin = perturbed(model, 0.3)
    params = [GREEDY, SAMPLED]
    drafter = ModelDrafter(twin, shape, sampling=sampling)
    without = proposed(drafter, model, params)
    tree = proposed(drafter, model, params, leaf_probs=True)
    assert torch.equal(tree.tokens, without.tokens) and torch.equal(tree.law, without.law)
    assert tree.draft_probs is not None
    for row, prompt in enumerate(PROMPTS):
        for node in range(tree.width):
            wanted = law_after(twin, prompt + path(tree, row, node), (SamplingParams(temperature=1.0), SAMPLED)[row])
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, atol=1e-5, rtol=1e-4)
