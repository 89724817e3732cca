"""Typical acceptance by hand, greedy as its limit, and that it is as lossy as it says."""

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.exactness.reference import reference_decode
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree, TreeShape
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.test_distribution import LEVEL, SAMPLINGS, p_value
from tests.verifiers.cases import complete
from verifiers.longest_path import TypicalVerifier

P = [0.6, 0.3, 0.08, 0.02]


def stop_of(tokens: list[int], shape: TreeShape, **kwargs: float) -> int:
    tree = DraftTree.from_shape(shape, torch.tensor([tokens]))
    table = torch.tensor(P, dtype=torch.float64).expand(1, len(tokens), 4).contiguous()
    law = TypicalVerifier(**kwargs).laws(tree, table).stop
    assert law.sum() == 1 and law.max() == 1
    return int(law.argmax())


def test_by_hand() -> None:
    # H = .948, so delta * exp(-H) = 0.3 * 0.3875 = 0.1163 is above epsilon = 0.09, which is then the threshold.
    chain = TreeShape.chain(3)
    assert stop_of([0, 0, 1, 2], chain) == 2  # .6 and .3 pass, .08 does not
    assert stop_of([0, 2, 0, 0], chain) == 0  # what follows a rejected token is lost
    assert stop_of([0, 0, 1, 2], chain, epsilon=0.05) == 3
    assert stop_of([0, 0, 1, 2], chain, epsilon=0.5, delta=0.9) == 1  # 0.9 * exp(-H) = .353 is the smaller one
    # Two paths of length two: the more probable one; the longer one wins over the more probable.
    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])
    assert stop_of([0, 1, 0, 1, 0], shape) == 4
    assert stop_of([0, 1, 0, 1, 2], shape) == 3


@pytest.mark.parametrize("drafter", ["medusa", *(complete(name, strong=False) for name in ("model_tree_iid", "ngram"))])
def test_greedy_is_exact(drafter: str) -> None:
    model = tiny_model()
    engine = Engine(Target(model), DRAFTERS[drafter](model), TypicalVerifier(), max_length=64)
    for prompt in ([1, 2, 3], [5, 6, 5, 6, 5]):
        output = engine.generate([prompt], SamplingParams(max_new_tokens=16))[0]
        assert list(output.token_ids) == reference_decode(model, prompt, SamplingParams(max_new_tokens=16))


@pytest.mark.full  # by enumeration in test_lossy.py
def test_it_is_lossy_through_the_engine() -> None:
    model = tiny_model(vocab_size=5, scale=1.5, layers=2)
    assert p_value(model, "model_chain_iid", TypicalVerifier(), SAMPLINGS["temperature 1"]) < LEVEL


@pytest.mark.parametrize(("kwargs", "words"), [({"epsilon": 0.0}, "epsilon=0.0"), ({"delta": -1.0}, "delta=-1.0")])
def test_bad_thresholds(kwargs: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TypicalVerifier(**kwargs)
