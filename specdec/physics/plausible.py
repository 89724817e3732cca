"""Whether fitted constants are possible at all: no forward is faster than its bytes and operations allow."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.physics.bounds import CACHES, TOLERANCE, Roof, Work
from specdec.physics.step_cost import StepCost, StepSize


@dataclass(frozen=True, kw_only=True)
class LeastWork:
    """What forwards of a model must at least do.

    Attributes:
        weight_bytes: Weights that any forward reads.
        kv_bytes: Keys and values per position.
        token_flops: Operations per token in products with weights.
        pair_flops: Operations of attention per pair of a query and a position.
    """

    weight_bytes: float
    kv_bytes: float
    token_flops: float
    pair_flops: float

    def of(self, size: StepSize) -> Work:
        """Return the work of a forward."""
        return Work(
            self.weight_bytes + self.kv_bytes * size.positions,
            self.token_flops * size.tokens + self.pair_flops * size.pairs,
        )


@dataclass(frozen=True)
class Meaning:
    """A constant beside the least that it can be.

    Attributes:
        symbol: ``"delta"`` (δ), ``"gamma"`` (γ) or ``"alpha"`` (α).
        what: What it stands for.
        seconds: The constant.
        least: The least that the device allows.
        excuse: Why the least is no bound here: ``"caches"`` may hold what this constant is about, or operations are
            ``"hidden"`` behind what memory does at the same time; empty where it is one.
    """

    symbol: str
    what: str
    seconds: float
    least: float
    excuse: str = ""

    @property
    def utilization(self) -> float | None:
        """The least over the constant: the share of the peak that it makes use of; None if it is 0."""
        return self.least / self.seconds if self.seconds else None

    @property
    def impossible(self) -> bool:
        """Whether it is faster than physics, beyond the noise of the peaks."""
        return not self.excuse and self.seconds < self.least * (1 - TOLERANCE)


def meanings(
    cost: StepCost, sizes: Sequence[StepSize], least: LeastWork, roof: Roof, *, cache_bytes: float
) -> list[Meaning]:
    """Return the constants of a step's cost with their physical meaning.

    δ is that of the range of fewest tokens, where memory is the bound: weights over bandwidth. γ is that of the range
    of most tokens: operations over the peak rate. In a range between, the one may hide behind the other. α is keys and
    values over bandwidth. Where a query of its own reads them again (β), the two are taken together for one query.

    Args:
        sizes: Those that were measured.
        least: What forwards must do.
        cache_bytes: The size of the device's last cache; 0 if it is unknown.
    """
    first, last = cost.ranges[0], cost.ranges[-1]
    longest = max(size.positions for size in sizes)
    largest = least.of(max(sizes, key=lambda size: size.tokens))
    weights, kv, per_token = least.weight_bytes, least.kv_bytes, least.token_flops
    in_caches, kv_in_caches = (size < CACHES * cache_bytes for size in (weights, kv * longest))
    hidden = largest.intensity < roof.ridge
    fixed = first.fixed + first.per_token * (1 if first.upto == 1 else 0)
    alpha = cost.per_position + cost.per_pair
    found = [
        Meaning("delta", "weights / bandwidth", fixed, weights / roof.bandwidth, "caches" if in_caches else ""),
        Meaning("gamma", "FLOPs per token / peak", last.per_token, per_token / roof.flops, "hidden" if hidden else ""),
        Meaning("alpha", "KV per position / bandwidth", alpha, kv / roof.bandwidth, "caches" if kv_in_caches else ""),
    ]
    return [each for each in found if each.symbol == "delta" or each.seconds]


def check_possible(
    cost: StepCost, sizes: Sequence[StepSize], least: LeastWork, roof: Roof, *, cache_bytes: float
) -> None:
    """Refuse constants that are faster than physics; arguments are those of ``meanings``.

    Besides the constants themselves, the predicted time of every size is compared with the bound that nobody beats.

    Raises:
        ValueError: Names the constant, or the size, and the bound.
    """
    for each in meanings(cost, sizes, least, roof, cache_bytes=cache_bytes):
        if each.impossible:
            raise ValueError(
                f"the target's forward has {each.symbol} = {each.seconds:.3g} s, and {each.what} is {each.least:.3g} "
                f"s: that is faster than physics, so that times or peaks are wrong; measure again on an idle machine"
            )
    for size in sizes:
        work = least.of(size)
        bound, seconds = roof.least_seconds(work), cost.seconds(size)
        memory_bound = work.intensity < roof.ridge
        if memory_bound and work.bytes < CACHES * cache_bytes:
            continue
        if seconds < bound * (1 - TOLERANCE):
            raise ValueError(
                f"the target's forward of {size.tokens:g} tokens behind {size.positions:g} positions would take "
                f"{seconds:.3g} s, and at least {bound:.3g} s are needed: that is faster than physics, so that times "
                f"or peaks are wrong; measure again on an idle machine"
            )
