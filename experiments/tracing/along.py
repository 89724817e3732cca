"""The expected number of rounds that a known text takes: neither drafts nor acceptance are drawn.

Let s_i be the probability that at least i drafts of the round behind n tokens are accepted, given that the output is
this text (``Verifier.along``); s_0 = 1, and s_i = 0 beyond the draft. The text then takes F(0) rounds, where F = 0 once
it is out, and F(n) = 1 + sum_i (s_i - s_{i+1}) F(n + i + 1): AngelSpec's EDR (arXiv 2610.10411), here for any rule. A
text is emitted with the same probability whatever is drafted, so the mean over texts of the target is that of all runs.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.results.lossless import stated_exactness
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap, Statistic, ratio_of_sums
from specdec.acceptance import certain, ends_at_root, parts_of
from specdec.engine.engine import Engine
from specdec.engine.scheduler import View, Work
from specdec.interfaces import Drafter, Laws, Round, Verifier
from specdec.requests import Request, SamplingParams
from specdec.sampling import one_hot
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt, and what the target wrote behind it."""


def refusal(drafter: Drafter, rule: Verifier, sampling: SamplingParams) -> str | None:
    """Why the rounds along a text have no closed form; None if they have one."""
    name, drafts = type(rule).__name__, type(drafter).__name__
    if rule.exactness is not Exactness.EXACT:
        return f"{name} is not exact, so that its texts are not the target's: compare served runs"
    if drafter.adapts:
        return f"{drafts} drafts by more than the text so far (other requests, or how rounds went): compare served runs"
    try:
        rule.check(drafter)
        drawn = _drawn(drafter, sampling) and drafter.along(lambda count: torch.empty(0, count))
    except ValueError as error:
        return str(error)
    if drawn and type(rule).along is Verifier.along:
        return f"{name} states no closed form of its rounds along a text: compare served runs"
    return None


def compared(
    target: Target, drafters: Mapping[str, Drafter], rules: Mapping[str, Verifier], texts: Mapping[str, Sequence[Text]],
    sampling: SamplingParams, base: dict[Hashable, list[float]], *, baseline: str, bootstrap: Bootstrap,
) -> list[Row]:  # fmt: skip
    """A row per drafter and rule: tokens per expected round, and the gain over the first drafter with the baseline.

    Intervals are over prompts. ``base`` has the rounds that gains are over, by texts, and gets those that it lacks.
    """
    names, flat = zip(*((name, text) for name, some in texts.items() for text in some), strict=True)
    tokens, done = [len(output) for _, output in flat], list[Row]()

    def gain(tokens: np.ndarray, rounds: np.ndarray, others: np.ndarray, *, axis: int = -1) -> Any:
        return ratio_of_sums(tokens, rounds, axis=axis) - ratio_of_sums(tokens, others, axis=axis)

    def figure(name: str, statistic: Statistic, *columns: Sequence[float]) -> Row:
        known = {name: float(statistic(*map(np.array, columns)))}
        return known | ends(name, bootstrap.over_prompts(statistic, names, columns))

    for label, drafter in drafters.items():
        why = {name: refusal(drafter, rule, sampling) for name, rule in rules.items()}
        fitting = {name: rule for name, rule in rules.items() if why[name] is None}
        counts = expected_rounds(target, drafter, fitting, flat, sampling) if fitting else {}
        first = base.setdefault(flat, counts[baseline]) if baseline in counts else base.get(flat)
        for name, rule in rules.items():
            row: Row = {"drafts": label, "temperature": sampling.temperature, "rule": name, "refused": why[name]}
            row |= {"exactness": stated_exactness(rule), "expected_rounds": None}
            if (rounds := counts.get(name)) is not None:
                row["expected_rounds"] = sum(rounds) / len(rounds)
                row |= figure("tokens_per_round", ratio_of_sums, tokens, rounds)
                row |= figure("gain", gain, tokens, rounds, first) if first and rounds is not first else {}
            done.append(row)
    return done


def expected_rounds(
    target: Target, drafter: Drafter, rules: Mapping[str, Verifier], texts: Sequence[Text], sampling: SamplingParams,
    *, batch_size: int = 8, optimize: bool = True,
) -> dict[str, list[float]]:  # fmt: skip
    """The expected rounds of every text under each rule, where every round drafts.

    Raises:
        ValueError: There is no closed form (``refusal``), or a text is not the target's with this sampling.
    """
    if reasons := [reason for rule in rules.values() if (reason := refusal(drafter, rule, sampling)) is not None]:
        raise ValueError(reasons[0])
    drawn, depth = _drawn(drafter, sampling), drafter.max_depth
    follow = _Following([output for _, output in texts], depth)
    reach = {label: [np.zeros((len(output), depth)) for _, output in texts] for label in rules}

    def look(seen: Round) -> None:
        tree, found = seen.tree, dict[str, Tensor]()
        if drawn and tree.draft_probs is not None:
            p, q = seen.target_probs[:, :-1].double(), tree.draft_probs[:, :-1].double()
            tokens, valid = tree.tokens[:, 1:], tree.valid[:, 1:]
            if (valid & (p.gather(2, tokens[..., None])[..., 0] <= 0)).any():
                raise ValueError("the target excludes a token of a text: give texts that it wrote with this sampling")
            found = {label: rule.along(p, q, tokens, min(drawn)).where(valid, 0) for label, rule in rules.items()}
        else:  # where nothing was drawn from q, every exact rule walks along the target's own tokens
            following = follow.ahead(depth + 1).to(tree.tokens.device).gather(1, tree.depth)
            walked = certain(tree, following).num_accepted[:, None]
            found = dict.fromkeys(rules, (torch.arange(depth, device=walked.device) < walked).double())
        for label, given in found.items():
            for request, row in zip(seen.requests, given.cpu().numpy(), strict=True):
                if request is not None:
                    reach[label][request.sampling.stream or 0][len(request.output_ids), : len(row)] = row

    rows = parts_of(batch_size, (drafter.max_nodes + 1) * target.vocab_size)[0].stop
    most = max(len(prompt) + len(output) for prompt, output in texts) + depth + 1
    options: Any = {"max_batch_size": rows, "max_length": min(most, target.max_length), "optimize": optimize}
    asked = drafter.along(follow.ahead) if drawn else drafter
    with Engine(target, asked, follow, recording="off", **options) as engine:
        engine.runner.joins = False  # so that every drafter drafts in its first round
        engine.on_turn, engine.on_round = follow.note, look
        wanted = [replace(sampling, n=1, stream=i, max_new_tokens=len(output)) for i, (_, output) in enumerate(texts)]
        done = engine.generate([prompt for prompt, _ in texts], wanted)
    for number, ((_, output), each) in enumerate(zip(texts, done, strict=True)):
        if each.token_ids != tuple(output):
            raise ValueError(f"text {number} goes on behind its end ({each.error or each.finish_reason}): cut it there")
    return {label: [rounds_of(each) for each in tables] for label, tables in reach.items()}


def rounds_of(reach: Float[np.ndarray, "token depth"]) -> float:
    """F(0), from s_1, s_2, … behind every number of tokens.

    Three tokens: the round behind none surely accepts one draft, that behind two has none, so F(0) = 1 + F(2) = 2.
    """
    count, depth = reach.shape
    ends = -np.diff(reach, axis=1, prepend=1, append=0)
    to_go = np.zeros(count + depth + 1)
    for done in reversed(range(count)):
        to_go[done] = 1 + ends[done] @ to_go[done + 1 : done + depth + 2]
    return float(to_go[0])


class _Following(Verifier):
    """Accepts nothing and emits the next token of a known text, so that a round begins behind each of its tokens."""

    exactness, samplings = Exactness.EXACT, frozenset(DraftSampling)

    def __init__(self, texts: Sequence[Sequence[int]], depth: int):
        self._texts = [torch.tensor([*text, *[0] * (depth + 1)]) for text in texts]
        self._decode: Sequence[Request] = ()

    def note(self, view: View, work: Work) -> None:
        self._decode = work.decode

    def ahead(self, count: int) -> Int[Tensor, "batch position"]:
        """The next tokens of every row that decodes now; anything behind a text's end."""
        rows = sorted((each.slot, each) for each in self._decode if each.slot >= 0 and not each.to_prefill)
        ahead = [(self._texts[each.sampling.stream or 0], len(each.output_ids)) for _, each in rows]
        return torch.stack([text[done : done + count] for text, done in ahead])

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        following = one_hot(self.ahead(1)[:, 0].to(target_probs.device), target_probs.shape[2])
        return Laws(ends_at_root(target_probs), lambda _: following)


def _drawn(drafter: Drafter, sampling: SamplingParams) -> frozenset[DraftSampling]:
    """The laws by which anything is drawn at random."""
    return frozenset() if sampling.greedy else drafter.laws - {DraftSampling.DETERMINISTIC}
