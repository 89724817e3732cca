"""Does the output follow the target with every rule that takes the drafts?

The rules are asked about the drafter's own rounds, so that no forward is made for them. Every token that a rule emits
in a round is turned into a number by the target's distribution at its place. What later rounds would emit is replaced
by fresh uniform numbers, which is what tokens from the target would give. If the output follows the target, these
numbers are uniform and independent: this holds if, and only if, the joint distribution is right.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy.stats
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.drafter_checks import outputs
from specdec.drafter_checks.findings import Finding, failed, passed
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.drafter_checks.uniformity import FEWEST, LEVEL, independent, uniform
from specdec.interfaces import Drafter, Round, Verifier, fitting_rules
from specdec.tree import DraftTree
from specdec.types import Exactness, Noise

LENGTH = 3
"""Tokens of an output whose joint distribution is tested."""
EDGE = 4  # cells of the unit cube along an edge


def name_of(rule: Verifier) -> str:
    """Returns the name of the check of a rule."""
    return f"exact with {type(rule).__name__}"


def exact_rules(drafter: Drafter) -> list[Verifier]:
    """Returns every exact rule that takes a drafter's drafts, has been imported and needs no arguments.

    References, which are too slow for a model's vocabulary, are left out.
    """
    found = []
    for rule in fitting_rules(drafter):
        if rule.exactness is Exactness.EXACT and not rule.is_reference:
            try:
                found.append(rule())
            except TypeError:
                continue
    return found


class ByRule:
    """The tokens that rules would have emitted in the rounds that were played.

    Args:
        rules: The rules, of which those with shared noise are left to ``finding``.
        stage: Where the drafter is tried.
    """

    def __init__(self, rules: Sequence[Verifier], stage: Stage):
        self.rules = [rule for rule in rules if rule.noise is not Noise.SHARED and stage.verifier.noise is rule.noise]
        self.total = len(rules)
        self._numbers: dict[int, list[np.ndarray]] = defaultdict(list)
        self._impossible: set[int] = set()
        self._generator = torch.Generator().manual_seed(1)

    def note(self, played: Round) -> None:
        """Ask the rules about a round."""
        tree, p = played.tree, played.target_probs
        drafted = torch.tensor([request is not None for request in played.requests])
        sampled = torch.tensor([request is not None and not request.sampling.greedy for request in played.requests])
        for number, rule in enumerate(self.rules):
            laws = rule.laws(tree, p)
            stop = self._draw(laws.stop)
            numbers, excluded = _numbers(tree, p, stop, self._draw(laws.after(stop)), self._generator)
            if bool((excluded & drafted).any()):
                self._impossible.add(number)
            self._numbers[number].append(numbers[sampled].numpy())

    def _draw(self, weights: Float[Tensor, "batch choice"]) -> Int[Tensor, " batch"]:
        return torch.multinomial(weights.float().cpu().clamp(min=0), 1, generator=self._generator)[:, 0].to(
            weights.device
        )

    def finding(self, rule: Verifier, stage: Stage, jobs: Sequence[Job], plain: Sequence[Run]) -> Finding:
        """Returns the finding about a rule.

        Args:
            rule: One of those that were given.
            stage: Where the drafter is tried.
            jobs: Requests of many kinds.
            plain: Plain decoding's outputs for them, with the noise of the stage's own rule.
        """
        name = name_of(rule)
        if rule not in self.rules:
            apart = replace(stage, verifier=rule)
            own = plain if rule.noise is stage.verifier.noise else outputs.plainly(apart, jobs)
            found = outputs.greedy_outputs(apart, jobs, run(apart.engine(slots=3, chunk=7), jobs, rows_of_q=0), own)
            return replace(found, check=name)
        number = self.rules.index(rule)
        if number in self._impossible:
            return failed(name, "it emits a token that the target excludes there, so that greedy outputs differ, too")
        table = np.concatenate(self._numbers[number]) if self._numbers[number] else np.zeros((0, LENGTH))
        if len(table) < FEWEST:
            return passed(name, "greedy outputs are the target's; too few rounds were sampled to test the others")
        tests = {f"token {place}": uniform(table[:, place].tolist()) for place in range(LENGTH)}
        for one in range(LENGTH):
            for other in range(one + 1, LENGTH):
                tests[f"tokens {one} and {other}"] = independent(table[:, one].tolist(), table[:, other].tolist())
        cells = np.histogramdd(table, bins=EDGE, range=[(0, 1)] * LENGTH)[0]
        tests[f"{LENGTH} tokens together"] = float(scipy.stats.chisquare(cells.ravel()).pvalue)
        where, p_value = min(tests.items(), key=lambda test: test[1])
        limit = LEVEL / (len(tests) * self.total)
        detail = (
            f"smallest p-value {p_value:.2g} of {len(tests)} tests, {len(table)} rounds ({where}), limit {limit:.1g}"
        )
        if p_value < limit:
            return failed(name, f"sampled outputs do not follow the target: {detail}")
        return passed(name, detail)


def _numbers(
    tree: DraftTree,
    p: Float[Tensor, "batch node vocab"],
    stop: Int[Tensor, " batch"],
    after: Int[Tensor, " batch"],
    generator: torch.Generator,
) -> tuple[Float[Tensor, "batch place"], Bool[Tensor, " batch"]]:
    """Returns the numbers of a round's first tokens, and whether one of them is a token that p excludes.

    Args:
        tree: The drafts.
        p: The target's distributions.
        stop: Where each row's path ends.
        after: The token that follows it.
        generator: Draws what the round does not say.
    """
    rows = torch.arange(len(stop), device=stop.device)
    parents = tree.parents.expand(len(stop), -1)
    path, end = [stop], tree.depth.expand(len(stop), -1)[rows, stop]
    for _ in range(int(end.max())):  # from the end up to the root, which has itself for a parent here
        path.append(parents[rows, path[-1]].clamp(min=0))
    found = torch.rand(len(stop), LENGTH, dtype=torch.float64, generator=generator)
    ids = torch.arange(p.shape[-1], device=p.device)
    excluded = torch.zeros(len(stop), dtype=torch.bool)
    for place in range(min(LENGTH, int(end.max()) + 1)):
        there = place <= end
        up = torch.stack(path)[(end - place).clamp(min=0), rows]
        down = torch.stack(path)[(end - place - 1).clamp(min=0), rows]
        token = torch.where(end == place, after, tree.tokens[rows, down])
        weights = p[rows, up].double()
        own = weights.gather(1, token[:, None])
        before = ((weights > own) | ((weights == own) & (ids < token[:, None]))).to(weights.dtype)
        number = ((weights * before).sum(1) + found[:, place].to(p.device) * own[:, 0]) / weights.sum(1)
        found[:, place] = number.cpu().where(there.cpu(), found[:, place])
        excluded |= (there & (own[:, 0] <= 0)).cpu()
    return found, excluded


def by_rule(
    watched: ByRule,
    rules: Sequence[Verifier],
    stage: Stage,
    jobs: Sequence[Job],
    plain: Sequence[Run],
    attempt: Callable[[str, Callable[[], Finding]], Finding],
) -> list[Finding]:
    """Returns a finding for every rule, until one has failed."""
    found: list[Finding] = []
    for rule in rules:
        found.append(attempt(name_of(rule), lambda rule=rule: watched.finding(rule, stage, jobs, plain)))
        if found[-1].failed:
            break
    return found
