"""Several policies beside each other in one run: what they lose against the best fixed length."""

from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from experiments.config.sections import bootstrap_of
from experiments.measuring.measure import Contender
from experiments.reporting.policies import loss_table
from experiments.reporting.table import Table
from experiments.results.policy_losses import policy_losses
from experiments.results.records import Record
from experiments.session.pacing import policy_of
from specdec.drafting.policies import CostAwareLength, FixedLength, LengthPolicy
from specdec.engine.engine import Engine


def closing(config: DictConfig) -> Callable[[Sequence[Record], Sequence[Contender]], Sequence[Table]]:
    """Returns what makes the table of losses at the end of a run of several policies."""

    def tables(records: Sequence[Record], contenders: Sequence[Contender]) -> Sequence[Table]:
        found = {each.method: policy_of(each.engine.drafter) for each in contenders if isinstance(each.engine, Engine)}
        policies = {name: found[name] for name in map(str, config.policies) if name in found}
        fixed = [name for name, policy in policies.items() if isinstance(policy, FixedLength)]
        costs = [policy.costs for policy in policies.values() if isinstance(policy, CostAwareLength)]
        bootstrap = bootstrap_of(config)
        losses = policy_losses(
            records,
            fixed=fixed,
            by_depth=[name for name, policy in policies.items() if isinstance(policy, LengthPolicy)],
            others=[name for name in policies if name not in fixed],
            costs=costs[0] if costs else None,
            rows=config.engine.max_batch_size,
            bootstrap=bootstrap,
        )
        table = loss_table(losses, bootstrap.confidence)
        return [] if table is None else [table]

    return tables
