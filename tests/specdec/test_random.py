"""The random numbers, and one round's acceptance, which draws with them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec import DraftSampling, DraftTree, Exactness, Laws, Verdict, Verifier
from specdec.acceptance import accept, path_to
from specdec.random import Purpose, draw, mix, request_key, shared_noise, uniforms

ALPHA = 1e-4
COUNT = 40_000
LARGEST = 1 - 2.0**-52  # of uniforms()


def along(coordinate: str) -> torch.Tensor:
    """``COUNT`` uniforms along one coordinate of the counter, all others fixed; of seeds and streams a quarter."""
    key, zero = torch.tensor([request_key(7, 3)]), torch.zeros(1, dtype=torch.long)
    if coordinate == "index":
        return uniforms(key, zero, Purpose.ACCEPT, COUNT)[0]
    if coordinate == "round":
        return uniforms(key.expand(COUNT), torch.arange(COUNT), Purpose.ACCEPT, 1)[:, 0]
    some = range(COUNT // 4)
    seeds = torch.tensor([request_key(i, 3) if coordinate == "seed" else request_key(7, i) for i in some])
    return uniforms(seeds, zero.expand(len(seeds)), Purpose.ACCEPT, 1)[:, 0]


def independent(first: torch.Tensor, second: torch.Tensor) -> None:
    """Neither correlated nor dependent on a 16 by 16 grid (each fails by chance with 1e-4)."""
    x, y = first.numpy(), second.numpy()
    assert stats.pearsonr(x, y).pvalue > ALPHA
    counts, _, _ = np.histogram2d(x, y, bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(counts.ravel()).pvalue > ALPHA


def uniform(u: torch.Tensor) -> None:
    assert stats.kstest(u.numpy(), "uniform").pvalue > ALPHA
    counts, _ = np.histogram(u, bins=256, range=(0, 1))
    assert stats.chisquare(counts).pvalue > ALPHA


@pytest.mark.parametrize("coordinate", ["index", "round", "stream", "seed"])
def test_uniform_and_independent_along_every_coordinate(coordinate: str) -> None:
    u = along(coordinate)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() <= LARGEST
    uniform(u)
    independent(u[:-1], u[1:])


@pytest.mark.parametrize("count", [1, 3, 200])
def test_the_compiled_numbers_are_those_of_the_tensor_operations(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=torch.Generator().manual_seed(1))
    rounds = torch.tensor([0, 1, 2, 1000, 2**40])
    found = [uniforms(keys.flip(0).flip(0), rounds, purpose, count) for purpose in Purpose]
    assert torch.equal(found[0], uniforms(torch.stack([keys, keys], 1)[:, 0], rounds, Purpose.ACCEPT, count))
    monkeypatch.setattr("specdec.random.native_library", lambda: None)
    for purpose, numbers in zip(Purpose, found, strict=True):
        assert torch.equal(numbers, uniforms(keys, rounds, purpose, count))


def test_every_bit_is_a_fair_coin() -> None:
    """All 52 of them: 52 chances of 1e-4 / 52."""
    integers = (along("index") * 2.0**52).long()
    assert torch.equal(integers.double() * 2.0**-52, along("index"))
    for bit in range(52):
        assert stats.binomtest(int(((integers >> bit) & 1).sum()), COUNT).pvalue > ALPHA / 52, f"bit {bit}"


def test_purposes_indices_rounds_and_requests_do_not_share_numbers() -> None:
    keys = torch.tensor([request_key(1, 0)]).expand(COUNT // 4)
    rounds = torch.arange(COUNT // 4)
    accept, draft = (uniforms(keys, rounds, purpose, 3) for purpose in (Purpose.ACCEPT, Purpose.DRAFT))
    for index in range(3):
        independent(accept[:, index], draft[:, index])
    independent(accept[:, 0], accept[:, 1])
    independent(accept[:-1, 1], accept[1:, 0])
    independent(accept[:-1, 0], draft[1:, 0])
    assert torch.cat([accept, draft]).unique().numel() == 6 * (COUNT // 4)
    grid = range(80)
    keys = torch.tensor([[request_key(seed, stream) for stream in grid] for seed in grid])
    assert keys.unique().numel() == keys.numel()
    u = uniforms(keys.flatten(), torch.zeros(keys.numel(), dtype=torch.long), Purpose.ACCEPT, 1).view(80, 80)
    upper = torch.triu_indices(80, 80, offset=1)
    independent(u[upper[0], upper[1]], u[upper[1], upper[0]])
    independent(u[:, :-1].flatten(), u[:, 1:].flatten())
    independent(u[:-1].flatten(), u[1:].flatten())


def test_a_weak_generator_would_not_pass() -> None:
    """The same statistics reject a counter that is not mixed, and neighbours that share a number."""
    weyl = (torch.arange(COUNT) * 0.6180339887498949) % 1
    assert stats.kstest(weyl.numpy(), "uniform").pvalue > ALPHA  # uniform it is, but not independent
    with pytest.raises(AssertionError):
        independent(weyl[:-1], weyl[1:])
    u = along("index")
    mixed = torch.where(torch.arange(COUNT) % 20 == 0, u.roll(1), u)
    with pytest.raises(AssertionError):
        independent(mixed[:-1], mixed[1:])


def test_keys_are_reproducible_and_mixed_as_published() -> None:
    golden = -7046029254386353131
    states = torch.arange(1, 4) * golden
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(x) % 2**64 for x in mix(states)] == expected
    assert (request_key(0, 0), request_key(1, 0)) == (5197578548964807871, -2529857523242969672)
    for seed in (0, 1, -1, 2**62, -(2**63), 2**63 - 1):
        assert -(2**63) <= request_key(seed, 0) < 2**63


def test_shared_noise_is_exponential_and_independent_along_every_coordinate() -> None:
    """Token, position and stream, all others fixed, as uniforms."""
    key, steps = torch.tensor([request_key(7, 3)]), torch.arange(COUNT)
    keys = torch.tensor([request_key(7, i) for i in range(COUNT // 4)])
    for noise in (
        shared_noise(key, torch.tensor([[5]]), COUNT)[0, 0],
        shared_noise(key, steps[None], 3)[0, :, 2],
        shared_noise(keys, torch.full((len(keys), 1), 5), 3)[:, 0, 2],
    ):
        u = (-noise.double()).exp()
        uniform(u)
        independent(u[:-1], u[1:])
        with pytest.raises(AssertionError):  # noise that two neighbours share at times would not pass
            independent(torch.where(torch.arange(len(u)) % 20 == 0, u.roll(1), u)[:-1], u[:-1].roll(1))


def test_shared_noise_is_no_other_noise_and_depends_on_key_position_and_token_only() -> None:
    key, steps = torch.tensor([request_key(1, 0)]), torch.arange(COUNT // 4)
    noise = (-shared_noise(key, steps[None], 3)[0].double()).exp()
    independent(noise[1:, 1], noise[:-1, 2])
    for purpose in (Purpose.ACCEPT, Purpose.DRAFT):
        other = uniforms(key.expand(COUNT // 4), steps, purpose, 3)
        for index in range(3):
            independent(noise[:, index], other[:, index])
    keys = torch.tensor([request_key(5, stream) for stream in range(3)])
    positions = torch.tensor([[4, 5], [9, 10], [0, 1]])
    noise = shared_noise(keys, positions, 100)
    assert noise.dtype == torch.float32 and noise.shape == (3, 2, 100)
    assert (noise > 0).all() and torch.isfinite(noise).all()
    assert torch.equal(shared_noise(keys[1:2], positions[1:2, 1:], 40)[0, 0], noise[1, 1, :40])


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0, 3.0, 1e8]), min_size=1, max_size=12).filter(any),
    st.sampled_from([0.0, 2.0**-52, 0.1, 0.5, 1 - 2.0**-24, LARGEST]),
)
def test_draw_follows_its_definition_and_never_takes_weight_zero(weights: list[float], u: float) -> None:
    index = int(draw(torch.tensor(weights), torch.tensor(u, dtype=torch.float64)))
    assert weights[index] > 0
    # The first whose cumulative weight exceeds it, slow and literally, on the same float32 weights.
    cumulative = np.cumsum(np.array(weights, dtype=np.float32).astype(np.float64))
    assert index == next(i for i, mass in enumerate(cumulative) if mass > u * cumulative[-1])


PARENTS = [-1, 0, 1, 1]  # 0 - 1 - 2 with a second child 3 of node 1
VOCAB = 3
STOP_LAW = torch.tensor([0.4, 0.1, 0.2, 0.3])
NEXT_LAWS = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]])
JOINT = (STOP_LAW[:, None] * NEXT_LAWS).double()
ROWS = 20_000


class Given(Verifier):
    """Any two laws, whatever the target says."""

    exactness = Exactness.LOSSY
    samplings = frozenset({DraftSampling.DETERMINISTIC})

    def __init__(self, stop_law: torch.Tensor = STOP_LAW, next_laws: torch.Tensor = NEXT_LAWS):
        self._stop_law, self._next_laws = stop_law, next_laws

    def laws(self, tree: DraftTree, target_probs: torch.Tensor) -> Laws:
        return Laws(self._stop_law.expand(len(target_probs), -1), lambda stop: self._next_laws[stop])


def batch(rows: int) -> DraftTree:
    parents = torch.tensor(PARENTS).expand(rows, -1)
    return DraftTree.build(torch.zeros_like(parents), parents, max_depth=2, max_children=2)


def accepted(u: torch.Tensor, rule: Verifier | None = None) -> Verdict:
    return accept(rule or Given(), batch(len(u)), torch.full((len(u), 4, VOCAB), 1 / VOCAB), u)


def test_path_and_verdict_literally() -> None:
    stop = torch.tensor([0, 1, 2, 3])
    assert path_to(batch(4), stop).tolist() == [[-1, -1], [1, -1], [1, 2], [1, 3]]
    # Nodes out of order and loose bounds: the root's second child stands before the first one's children.
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]] * 2)
    loose = DraftTree.build(torch.zeros(2, 6, dtype=torch.long), parents, max_depth=5)
    assert path_to(loose, torch.tensor([5, 3])).tolist() == [[2, 4, 5, -1, -1], [1, 3, -1, -1, -1]]
    u = torch.tensor([[0.0, 0.0], [0.45, 0.61], [0.55, 0.1999], [0.9999, 0.9999]], dtype=torch.float64)
    verdict = accepted(u)
    assert verdict.path.tolist() == [[-1, -1], [1, -1], [1, 2], [1, 3]]
    assert verdict.num_accepted.tolist() == [0, 1, 2, 2]
    assert verdict.next_token.tolist() == [0, 2, 1, 2]
    torch.testing.assert_close(verdict.expected_accepted, torch.full((4,), 0.1 + 2 * 0.2 + 2 * 0.3))
    assert verdict.valid.all()


def joint_counts(u: torch.Tensor) -> torch.Tensor:
    """How often each pair of stop node and next token came: Int[node vocab]."""
    verdict = accepted(u)
    last = verdict.path.gather(1, (verdict.num_accepted - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
    return (last * VOCAB + verdict.next_token).bincount(minlength=4 * VOCAB).view(4, VOCAB)


def test_stop_and_next_token_follow_the_two_laws_jointly() -> None:
    """Fails by chance with probability 1e-4 for a new seed; with this one never. One uniform for both is noticed."""
    keys = torch.tensor([request_key(11, 0)]).expand(ROWS)
    counts = joint_counts(uniforms(keys, torch.arange(ROWS), Purpose.ACCEPT, 2))
    some = JOINT > 0
    assert counts[~some].sum() == 0
    wanted = JOINT[some] / JOINT.sum() * ROWS
    assert stats.chisquare(counts[some].numpy(), wanted.numpy()).pvalue > ALPHA
    # The mutant: each draw alone has the right law, and jointly they do not.
    counts = joint_counts(uniforms(keys, torch.arange(ROWS), Purpose.ACCEPT, 1).expand(-1, 2))
    alone = STOP_LAW.double() / STOP_LAW.double().sum() * ROWS
    assert stats.chisquare(counts.sum(1).numpy(), alone.numpy()).pvalue > ALPHA
    assert 0.5 * (counts / ROWS - JOINT).abs().sum() > 0.2, "the same uniform twice went unnoticed"


def test_laws_that_are_not_finite_are_reported_per_row() -> None:
    stop_law = torch.tensor([[0.4, 0.1, 0.2, 0.3], [torch.nan] * 4, [1.0, 0.0, 0.0, 0.0]])
    rule = Given(stop_law, torch.tensor([[torch.nan, 0.5, 0.5], *NEXT_LAWS[1:].tolist()]))
    verdict = accepted(torch.tensor([[0.9, 0.5]] * 3, dtype=torch.float64), rule)
    assert verdict.valid.tolist() == [True, False, False]
