"""The same drafts judged with either forward: all tokens of a round at once, and one token at a time.

An engine decodes with the help of a drafter. Every group of siblings that its output comes to is judged by p as the
round has computed it, and by p from forwards of one token behind the same text.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.measuring.parity import in_pieces, through_runner
from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap, difference_of_means
from specdec.engine.engine import Engine
from specdec.interfaces import Round, Verifier
from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors, distribution
from specdec.shape import TreeShape
from specdec.tree import DraftTree
from specdec.types import DraftSampling


def judged(engine: Engine, prompts: Tensor, sampling: SamplingParams, bootstrap: Bootstrap) -> Figures:
    """Return what drafts lose where all tokens of a round go through the model at once.

    Args:
        engine: Decodes one request at a time, by a rule that goes down level by level.
        sampling: Temperature and length; filters are left out.

    Returns:
        ``groups`` of siblings; the mean probability with which one of them is accepted ``by_one`` token per forward,
        and ``by_round``; how much less the latter is (``lost``), with its ``interval`` over prompts; and how many
        groups are judged otherwise (``changed``).

    Raises:
        ValueError: A request fails, or nothing was drafted.
    """
    assert engine.verifier is not None, "drafts are judged by a rule"
    rounds: list[tuple[DraftTree, Tensor, list[int]]] = []

    def look(seen: Round) -> None:
        path = [node for node in seen.verdict.path[0].tolist() if node >= 0]
        rounds.append((seen.tree.rows(slice(0, 1)), seen.target_probs[0].clone(), [0, *path]))

    engine.on_round = look
    given = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    tensors = {name: torch.tensor([value], device=prompts.device) for name, value in given.items()}
    law = SamplingTensors.of([sampling], **tensors, seen=None)
    sums, changed = np.zeros((3, len(prompts))), 0
    for row, prompt in enumerate(prompts):
        rounds.clear()
        (done,) = engine.generate([prompt.tolist()], sampling)
        if done.error is not None:
            raise ValueError(f"a request failed: {done.error}")
        output = torch.tensor([done.token_ids], device=prompts.device)
        plain, at = distribution(in_pieces(through_runner(engine.runner), prompt[None], output), law)[0], 0
        engine.runner.cache.vacate(0)  # a state is left there
        for tree, p, path in rounds:
            for node, alone in zip(path, plain[at:], strict=False):
                by_one, by_round = (accepted(engine.verifier, tree, node, each) for each in (alone, p[node]))
                if by_one is not None and by_round is not None:
                    sums[:, row] += [by_one, by_round, 1]
                    changed += by_one != by_round
            at += len(path)
    groups = sums[2].sum()
    if not groups:
        raise ValueError("nothing was drafted behind these prompts")
    by_one, by_round, _ = (sums.sum(1) / groups).tolist()
    interval = bootstrap.interval(difference_of_means, [sums[0], sums[2], sums[1], sums[2]])
    found = Figures(temperature=sampling.temperature, groups=int(groups), by_one=by_one, by_round=by_round)
    return found | Figures(lost=by_one - by_round, interval=interval, changed=changed)


def accepted(rule: Verifier, tree: DraftTree, node: int, p: Float[Tensor, " vocab"]) -> float | None:
    """Return how likely a child of a node in the first row is accepted once the node is; None without children.

    A single child that was drawn from q may have been any token: the sum of min(p, q).
    """
    children = [child for child in tree.children[0, node].tolist() if child >= 0]
    if not children:
        return None
    group, q = [node, *children], None if tree.draft_probs is None else tree.draft_probs[0, node]
    if q is not None and len(children) == 1 and int(tree.law[0, children[0]]) != DraftSampling.DETERMINISTIC:
        return float(torch.minimum(p, q).sum())
    alone = DraftTree.from_shape(
        TreeShape.branching(len(children)),
        tree.tokens[:1, group],
        sampling=tree.law[:1, group],
        draft_probs=None if q is None else q.expand(1, len(group), -1),
    )
    return 1 - float(rule.laws(alone, p.expand(1, len(group), -1)).stop[0, 0])
