"""Arguments that make no drafter: each is refused, and the refusal names the argument."""

from collections.abc import Callable
from typing import Any

import pytest

from drafters.block import BlockDrafter
from drafters.choice import ChoiceDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.mtp import MTPHead
from drafters.hydra import HydraDrafter
from drafters.marginals import MarginalDrafter
from drafters.medusa import MedusaDrafter
from drafters.merged import MergedDrafter
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NGramDrafter
from drafters.recycling import TokenRecyclingDrafter
from drafters.suffix import SuffixDrafter
from experiments.bench.synthetic import SyntheticDrafter
from specdec.drafting.builders import ExpansionTree
from specdec.interfaces import Sizes
from specdec.target.target import Target
from tests.components import block_head, eagle3_head, eagle_head, hydra_heads, medusa_heads
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

NAN = float("nan")
MODEL = tiny_model(vocab_size=16, layers=2)
BEST = ExpansionTree(4, 2, 4)
MISTAKES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (NGramDrafter, (), {"max_draft_tokens": 0}, "max_draft_tokens=0"),
    (NGramDrafter, (), {"branches": 0}, "branches=0"),
    (NGramDrafter, (), {"min_ngram": 0}, "min_ngram=0"),
    (NGramDrafter, (), {"max_ngram": 2, "min_ngram": 3}, "max_ngram=2 .* min_ngram=3"),
    (SuffixDrafter, (), {"max_draft_tokens": 0}, "max_draft_tokens=0"),
    (SuffixDrafter, (), {"mode": "graph"}, "mode='graph'"),
    (SuffixDrafter, (), {"tree_depth": 1}, "tree_depth=1"),
    (SuffixDrafter, (), {"factor": 0.01}, "factor=0.01"),
    (SuffixDrafter, (), {"factor": NAN}, "factor=nan"),
    (SuffixDrafter, (), {"min_probability": 0.0}, "min_probability=0.0"),
    (SuffixDrafter, (), {"shared": 1}, "shared=1"),
    (SuffixDrafter, (), {"shared_requests": 0}, "shared_requests=0"),
    (SyntheticDrafter, (), {"accept": 1.5}, "accept=1.5"),
    (SyntheticDrafter, (), {"accept": ["high"], "depth": None}, "accept='high'"),
    (SyntheticDrafter, (), {"accept": [0.5, -0.1], "depth": None}, "accept=-0.1"),
    (SyntheticDrafter, (), {"accept": [0.5, 0.4], "depth": 3}, "depth=3 .* accept"),
    (SyntheticDrafter, (), {"accept": 0.5, "depth": None}, "depth=None .* accept=0.5"),
    (SyntheticDrafter, (), {"accept": 0.5, "depth": 0}, "depth=0"),
    (SyntheticDrafter, (), {"accept": [], "depth": None}, "accept"),
    (SyntheticDrafter, (), {"cost": -1.0}, "cost=-1.0"),
    (MarginalDrafter, (), {"samples": 0}, "samples=0"),
    (MarginalDrafter, (), {"samples": 2000}, "samples=2000"),
    (MarginalDrafter, (), {"text_temperature": -0.5}, "text_temperature=-0.5"),
    (MarginalDrafter, (), {"text_temperature": NAN}, "text_temperature=nan"),
    (TokenRecyclingDrafter, ("large",), {}, "shape='large'"),
    (TokenRecyclingDrafter, (), {"scope": "batch"}, "scope='batch'"),
    (ModelDrafter, (MODEL, 2), {"sampling": "gumbel"}, "sampling='gumbel'"),
    (ChoiceDrafter, (NGramDrafter(), SuffixDrafter()), {}, "lookup is a NGramDrafter"),
    (ChoiceDrafter, (SuffixDrafter(), NGramDrafter()), {"start": -1}, "start=-1"),
    (ChoiceDrafter, (SuffixDrafter(), NGramDrafter()), {"memory": 0}, "memory=0"),
    (MergedDrafter, (ModelDrafter(MODEL, 2), NGramDrafter()), {}, "lookup=ModelDrafter"),
    (MergedDrafter, (SuffixDrafter(), None), {}, "model is None"),
    (MedusaDrafter, (medusa_heads(MODEL), 4), {}, "4 deep and there are 3 Medusa heads"),
    (MedusaDrafter, (medusa_heads(MODEL), [17]), {}, "17 most probable tokens of a vocabulary of 16"),
    (HydraDrafter, (hydra_heads(MODEL), 4), {}, "4 deep and there are 3 Hydra heads"),
    (EagleDrafter, ("there",), {}, r"EagleDrafter\.from_pretrained"),
    (EagleDrafter, (eagle3_head(MODEL),), {"sampling": "iid"}, "sampling=iid"),
    (EagleDrafter, (eagle_head(MODEL),), {"hidden_layers": 3}, "^hidden_layers=3"),
    (EagleDrafter, (eagle_head(MODEL),), {"hidden_layers": ("a",)}, r"^hidden_layers=\('a',\)"),
    (BlockDrafter, (block_head(MODEL), 4), {}, "4 deep and a block of 4 places predicts 3 tokens"),
    (BlockDrafter, (block_head(MODEL, shifted=True), 5), {}, "5 deep and a block of 4 places predicts 4 tokens"),
    (BlockDrafter, (block_head(MODEL),), {"block_size": 1}, "block_size=1"),
    (BlockDrafter, (block_head(MODEL), BEST), {"sampling": "iid"}, "most probable paths"),
    (MTPDrafter.from_pretrained, (), {"hidden_state": "pre"}, "hidden_state='pre'"),
    (MTPDrafter.from_pretrained, (), {"module": -1}, "module=-1"),
    (MTPHead.for_target, (tiny_model("gpt2", vocab_size=16),), {}, "gpt2"),
]


@pytest.mark.parametrize(("make", "given", "named", "words"), MISTAKES)
def test_it_is_refused_by_name(make: Callable[..., Any], given, named: dict[str, Any], words: str) -> None:
    with shapes_unchecked(), pytest.raises(ValueError, match=words):  # as for a user, whose types nothing checks
        make(*given, **named)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (BlockDrafter(block_head(MODEL), mask_token_id=16), "mask token 16"),
        (BlockDrafter(block_head(MODEL), hidden_layers=(4,)), "the input of layer 4"),
        (BlockDrafter(block_head(MODEL), hidden_layers=(0, 1)), "are 2: give 1"),
        (BlockDrafter(block_head(MODEL, target_layers=9)), "9 layers"),
        (BlockDrafter(block_head(MODEL, target_hidden_size=16)), "hidden states of width 16"),
        (BlockDrafter(block_head(MODEL, hidden_size=16)), "16 wide"),
        (TokenRecyclingDrafter([17]), "17 most probable tokens of a vocabulary of 16"),
        (MTPDrafter.from_pretrained(), "not loaded from files"),
    ],
)
def test_it_does_not_fit_the_target(drafter: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        drafter.bind(Target(MODEL), Sizes(max_batch_size=1, max_length=32))
