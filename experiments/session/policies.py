"""Puts a policy beside a drafter, measures what rounds cost where it needs to know, and keeps what it has learned."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from drafters.combined import AdaptiveDrafter
from experiments.config.sections import build, choice, component_of, in_sweep, plain
from experiments.measuring.rounds import measure_costs
from experiments.reporting.progress import phase
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies import CostAwareLength, CostAwareNodes, LengthPolicy, NodePolicy
from specdec.drafting.scored import ScoredDrafter
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.physics.calibrated import CalibratedRounds, is_calibrated
from specdec.target.target import Target

COSTS = "round_costs.json"
CALIBRATION = "calibration.json"

Policy = LengthPolicy | NodePolicy


def built_policy(config: DictConfig, section: str | None) -> Policy | None:
    """The policy of a section, if there is one. By calibrated costs it also sees how long contexts are."""
    if section is None:
        return None
    policy: Policy | None = build(config, section)
    costs = (plain(config, section) or {}).get("costs")
    if isinstance(policy, CostAwareLength) and costs is not None and is_calibrated(costs):
        policy.costs = CalibratedRounds.load(costs)
    return policy


def named_policy(config: DictConfig) -> str:
    """The policy of all methods, for titles: ``", policy table"``; empty where there is none, or each has its own."""
    kind = (config.get("policy") or {}).get("_target_")
    if config.get("policies") or kind is None:
        return ""
    chosen = choice("policy")
    return f", policy {chosen if chosen not in (None, 'none') else kind.rpartition('.')[2]}"


def paced(drafter: Drafter | None, policy: Policy | None) -> Drafter | None:
    """The drafter with the policy; as it is where there is none of the two.

    Raises:
        ValueError: The policy chooses among nodes, and the drafter has nothing to rate them by.
    """
    if drafter is None or policy is None:
        return drafter
    if isinstance(policy, LengthPolicy):
        return AdaptiveDrafter(drafter, policy)
    if not isinstance(drafter, ScoredDrafter):
        raise ValueError(
            f"{type(policy).__name__} chooses nodes by the probabilities of a drafting model, and "
            f"{type(drafter).__name__} has none: give policy=cost_aware or policy=additive, or another drafter"
        )
    return drafter.pruned_by(policy)


def settle_costs(
    drafter: Drafter | None, verifier: Verifier, target: Target, samples: Sequence[str], config: DictConfig, name: str
) -> list[str]:
    """Measure what rounds cost, if the drafter's policy needs that and was not given it, and return it in words.

    It is kept beside the results in a file of this ``name``, and read there by a run that is resumed.
    """
    policy, file = policy_of(drafter), Path(config.out, name)
    if drafter is None or not isinstance(policy, CostAwareLength | CostAwareNodes):
        return []
    if policy.costs is None and config.get("resume") and file.exists():
        policy.costs = RoundCosts.load(file)
    if policy.costs is None:
        assert target.tokenizer is not None, "refused before"
        given = [ids for text in samples if (ids := target.tokenizer.encode(text)[:512])] or [[0]]
        timed, by_nodes = (drafter.drafter, False) if isinstance(drafter, AdaptiveDrafter) else (drafter, True)
        rows = (1, config.engine.max_batch_size)
        phase("timing rounds, from none to all drafted tokens", shown=not in_sweep())
        policy.costs = measure_costs(target, timed, verifier, given, rows=rows, by_nodes=by_nodes)
    known = policy.costs
    if not isinstance(known, RoundCosts):
        return []
    file.parent.mkdir(parents=True, exist_ok=True)
    known.save(file)
    times = ", ".join(f"{1000 * taken:.0f}" for taken in known.table[0])
    return [f"drafts as much as pays, where 0 to {(known.nodes or (known.max_depth,))[-1]} a round take {times} ms"]


def keep_calibrations(engines: Mapping[str, Engine], folder: Path) -> list[Path]:
    """Write the calibrations by which node policies have predicted anything, and return their files."""
    written = []
    for method, engine in engines.items():
        policy = getattr(engine.session, "policy", None)
        if isinstance(policy, NodePolicy) and policy.calibration.errors():
            written.append(folder / (f"{method}_{CALIBRATION}" if len(engines) > 1 else CALIBRATION))
            policy.save(written[-1], method=method)
    return written


def policy_of(drafter: Drafter | None) -> Policy | None:
    """The policy beside a drafter."""
    return drafter.policy if isinstance(drafter, AdaptiveDrafter | ScoredDrafter) else None


def check_replayed(config: DictConfig, section: str) -> None:
    """Refuse a policy that cannot be played in virtual time."""
    component, _ = component_of(config, section)
    if component is not None and not issubclass(component, LengthPolicy):
        raise ValueError(
            f"{section}: {component.__name__} chooses among drafted nodes, which traces do not have: give "
            f"a policy of lengths, such as policy=cost_aware"
        )
