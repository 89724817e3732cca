"""What does a rule cost, and what does it bring? ``rules=[block] nodes=[8]``.

The cost of a rule is the time of ``accept``: both laws and both draws. What it brings is how many more tokens it
expects to accept than rejection sampling on the same drafts. Both are measured on random tables, with p and q about as
concentrated and as similar as those of a target and its drafter; ``experiments.replay`` shows what rules bring on real
ones. Let rejection sampling accept a tokens per round. A rule that accepts g more and costs c more time per round pays
where a whole round takes longer than c (a + 1) / g. The last columns give this in milliseconds, and as the number of
parameters of a target whose forward takes that long, scaled from the forward of a 110M target here.

``only=[operations]`` counts the operations of ``accept`` instead: on a GPU each is at least one kernel launch.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments.bench.engine.steps import Setting, make_runner, measure_step
from experiments.bench.models import make_target
from experiments.bench.options import option, read_options
from experiments.bench.rules import LAWS, NAMES, drafted, fits, make_rules, work_of
from experiments.bench.rules import SHAPES as COUNTED
from experiments.bench.timing import CPU, NOTHING, missed, show, timed, where
from specdec.acceptance import accept
from specdec.interfaces import Verifier
from specdec.random import draw
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Noise
from verifiers import RejectionVerifier

SHAPES = {8: (2, 4), 16: (4, 4), 64: (8, 8)}
"""Trees by their number of nodes: paths from the root, and their length."""
CHEAP = ("rejection", "block", "target_walk")
SHARE = 0.10
"""The largest share of a 110M target's forward that each of ``CHEAP`` may take, at ``BAR``."""
BAR = (16_384, 8)
"""Vocabulary and nodes of that requirement."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    rules: tuple[str, ...] = option(NAMES, "names of conf/verifier", choices=NAMES)
    vocabularies: tuple[int, ...] = option((4096, 32768, 131072), "sizes of the vocabulary", least=2)
    nodes: tuple[int, ...] = option((8, 16, 64), "drafted nodes", choices=tuple(SHAPES))
    batches: tuple[int, ...] = option((1, 8), "rows", least=1)
    repeats: int = option(7, "calls that are timed in each case", least=1)
    only: tuple[str, ...] = option(("costs",), "costs, operations, or both", choices=("costs", "operations"))


@dataclass(frozen=True)
class Case:
    """Drafts that rules are timed on: their shape, how every node is drawn, and the tables of all rows."""

    shape: TreeShape
    law: DraftSampling
    tokens: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    def tree(self) -> DraftTree:
        """Return the drafts, as a drafter of a static shape hands them over."""
        q = None if self.law is DraftSampling.DETERMINISTIC else self.q
        return DraftTree.from_shape(self.shape, self.tokens, sampling=self.law, draft_probs=q)


def shape_of(nodes: int, *, chain: bool) -> TreeShape:
    """Return a chain of so many nodes, or paths that share the root."""
    branches, length = SHAPES[nodes]
    return TreeShape.chain(nodes) if chain else TreeShape.branching(branches, *[1] * (length - 1))


def make_case(nodes: int, vocab: int, batch: int, *, chain: bool, law: DraftSampling) -> Case:
    """Return random tables and drafts drawn from them."""
    shape = shape_of(nodes, chain=chain)
    generator = torch.Generator().manual_seed(0)
    size = (batch, shape.num_nodes + 1, vocab)
    # Log-probabilities of a text's next token are about that spread; the drafter's are its own, on top.
    logits = 2.5 * torch.randn(size, generator=generator)
    q = (logits + 0.8 * torch.randn(size, generator=generator)).softmax(-1)
    return Case(shape, law, draw_tokens(shape, law, q, generator), logits.softmax(-1), q)


def draw_tokens(shape: TreeShape, law: DraftSampling, q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return drafts from q, whose rows do not depend on what is drawn above them."""
    batch = len(q)
    tokens = torch.zeros(batch, shape.num_nodes + 1, dtype=torch.long)
    for parent, children in enumerate(shape.children):
        left = q[:, parent].clone()
        for child in children:
            if law is DraftSampling.DETERMINISTIC:
                tokens[:, child] = left.argmax(-1)
            else:
                tokens[:, child] = draw(left, torch.rand(batch, generator=generator, dtype=torch.float64))
            if law is not DraftSampling.IID:
                left.scatter_(1, tokens[:, child, None], 0.0)
    return tokens


def cases_of(rule: Verifier, nodes: int) -> list[tuple[bool, DraftSampling]]:
    """Return chains of the first law that the rule takes, and trees of every sampled one, or the deterministic one."""
    found: list[tuple[bool, DraftSampling]] = []
    for chain in (True, False) if rule.noise is not Noise.SHARED else ():
        taken = [law for law in reversed(LAWS) if fits(rule, shape_of(nodes, chain=chain), law)]
        sampled = [law for law in taken if law is not DraftSampling.DETERMINISTIC]
        found += [(chain, law) for law in (taken[:1] if chain else sampled or taken)]
    return found


def time_rule(rule: Verifier, case: Case, repeats: int) -> float:
    """Return the seconds of a round's acceptance."""
    uniforms = torch.rand(len(case.tokens), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    call = lambda: accept(rule, case.tree(), case.p, uniforms)  # noqa: E731
    return timed(call, repeats=repeats, limit=1e9, warm_up=2)["seconds"]


def accepted_by(rules: Sequence[Verifier], case: Case, *, draws: int) -> list[float]:
    """Return the accepted tokens that rules expect, over the same drafts: ``draws``, or fewer after a second.

    What a rule expects given one draft says little: it may lose on that one and win on average.
    """
    generator = torch.Generator().manual_seed(2)
    found: list[list[float]] = [[] for _ in rules]
    begin = time.perf_counter()
    for _ in range(draws):
        tree = replace(case, tokens=draw_tokens(case.shape, case.law, case.q, generator)).tree()
        for values, rule in zip(found, rules, strict=True):
            values.append(float((rule.laws(tree, case.p).stop * tree.depth).sum(-1).mean()))
        if time.perf_counter() - begin > 1:
            break
    return [statistics.mean(values) for values in found]


def forward_time(vocab: int, nodes: int, repeats: int) -> float:
    """Return the seconds of a verify forward of a random 110M target in bf16, behind 128 tokens."""
    target, setting = make_target("110m", CPU, torch.bfloat16, vocab_size=vocab), Setting(1, nodes + 1, 128)
    return measure_step(make_runner(target, setting, setting.nodes), setting, repeats=repeats, limit=1e9)["seconds"]


def pays(row: dict[str, Any]) -> str:
    """Return from which length of a round on a rule pays, in milliseconds; or in words.

    (R + cost) / (accepted + 1 + gain) < R / (accepted + 1), solved for R: 1 ms more for 0.1 tokens on top of 2.0
    emitted ones pays where a round takes more than 20 ms.
    """
    cost, gain = row["took"] - row["base_took"], row["accepted"] - row["base_accepted"]
    if row["rule"] == "rejection":
        return NOTHING
    if gain <= 1e-4:
        return "never" if cost > 0 else "cheaper"
    return "always" if cost <= 0 else f"{1e3 * cost * (row['base_accepted'] + 1) / gain:.2f}"


def rows(
    rules: dict[str, Verifier],
    vocabularies: Sequence[int],
    nodes: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    draws: int = 64,
) -> Iterator[dict[str, Any]]:
    """Yield a row per rule and case, rejection sampling timed beside every rule.

    A row has the case, the seconds that the rule ``took`` and the tokens that it ``accepted``, and both of rejection
    sampling (``base_``).
    """
    base = RejectionVerifier()
    for vocab, count, batch in itertools.product(vocabularies, nodes, batches):
        kinds = {kind for rule in rules.values() for kind in cases_of(rule, count)}
        for chain, law in sorted(kinds, reverse=True):
            case = make_case(count, vocab, batch, chain=chain, law=law)
            drafts = "chain" if chain else "{} x {}".format(*SHAPES[count])
            base_took = time_rule(base, case, repeats)
            for name, rule in rules.items():
                if (chain, law) not in cases_of(rule, count):
                    continue
                try:
                    took = time_rule(rule, case, repeats)
                    accepted, base_accepted = accepted_by([rule, base], case, draws=draws)
                except ValueError:  # a linear program is for tiny vocabularies
                    continue
                yield {
                    "rule": name, "exactness": rule.exactness.value, "vocab": vocab, "nodes": count, "batch": batch,
                    "case": f"{drafts}, {_words(law)}", "took": took, "accepted": accepted, "base_took": base_took,
                    "base_accepted": base_accepted,
                }  # fmt: skip


def _words(law: DraftSampling) -> str:
    return law.name.lower().replace("_", " ")


def main() -> None:
    """Time the rules, and print the table and the requirement; count operations, if that is wanted."""
    options = read_options(Options, __doc__)
    if "operations" in options.only:
        _count(options.rules)
    if "costs" in options.only:
        with torch.inference_mode():
            _costs(options)


def _costs(options: Options) -> None:
    rules = make_rules(options.rules)
    forward = forward_time(*BAR, options.repeats)
    about = f"forward of a 110M target, bf16, {BAR[1]} nodes, vocabulary {BAR[0]}, batch 1: {1e3 * forward:.1f} ms"
    found = []
    for row in rows(rules, options.vocabularies, options.nodes, options.batches, options.repeats):
        least = pays(row)
        cells = {
            **{name: str(row[name]) for name in ("vocab", "nodes", "batch")}, "drafts": row["case"],
            "rule (exactness)": missed(f"{row['rule']} ({row['exactness']})", wrong=row["exactness"] != "exact"),
            "ms": f"{1e3 * row['took']:.3f}", "accepted": f"{row['accepted']:.3f}",
            "over\nrejection": f"{row['accepted'] - row['base_accepted']:+.3f}",
            "of a 110M\nforward": f"{row['took'] / forward:.1%}", "pays from a\nround of, ms": least,
            "or a\ntarget of": f"{float(least) / 1e3 / forward * 110:,.0f}M" if least[0].isdigit() else "",
        }  # fmt: skip
        found.append(cells)
        # The table comes at the end, which may be many minutes away.
        print(" · ".join(str(cell) for cell in list(cells.values())[:7]), "tokens", flush=True)
    show(f"{where()}; {about}", found)
    cheap = {name: rule for name, rule in rules.items() if name in CHEAP}
    for row in rows(cheap, BAR[:1], BAR[1:], [1], 3 * options.repeats, 1):
        share = row["took"] / forward
        verdict = f"<= {SHARE:.0%} {'reached' if share <= SHARE else 'MISSED'}"
        sizes = f"vocabulary {row['vocab']}, {row['nodes']} nodes"
        print(
            f"{row['rule']}, {row['case']}, {sizes}: {1e3 * row['took']:.2f} ms, {share:.1%} of the forward ({verdict})"
        )


def _count(names: Sequence[str]) -> None:
    found = []
    for name, rule in make_rules([name for name in names if name != "transport"]).items():
        for law in (law for law in LAWS if law in rule.samplings):
            row = {"rule": name, "drafts": _words(law)}
            for per_row, (title, shape) in itertools.product((False, True), COUNTED.items()):
                text = NOTHING
                if fits(rule, shape, law):
                    work_of(rule, *drafted(shape, law, per_row=per_row))  # tables of a shape are made once
                    text = str(work_of(rule, *drafted(shape, law, per_row=per_row)).launches)
                row[title + (",\nper row" if per_row else "")] = text
            found.append(row)
    show("Operations per accepted round", found)
