"""What does a rule cost, and what does it bring? ``python -m experiments.bench verifiers rules=[block] nodes=[8]``.

The cost of a rule is the time of ``accept``: both laws and both draws. What it brings is how many more tokens it
expects to accept than rejection sampling on the same drafts. Both are measured on random tables, with p and q about as
concentrated and as similar as those of a target and its drafter; ``experiments.replay`` shows what rules bring on real
ones. Let rejection sampling accept a tokens per round. A rule that accepts g more and costs c more time per round pays
where a whole round takes longer than c (a + 1) / g. The last columns give this in milliseconds, and as the number of
parameters of a target whose forward takes that long, scaled from the forward of a 110M target here. Use all cores and
an otherwise idle machine.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from experiments.bench.options import option, read_options
from experiments.bench.rules import NAMES, make_rules
from experiments.bench.speed import llama_110m
from experiments.reporting import terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.tracing.draft_sets import DraftSet, refusal
from specdec.acceptance import accept
from specdec.forward import ForwardBatch
from specdec.interfaces import Verifier
from specdec.random import draw
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from verifiers import RejectionVerifier

SHAPES = {8: (2, 4), 16: (4, 4), 64: (8, 8)}
"""Trees by their number of nodes: paths from the root, and their length."""
CHEAP = ("rejection", "block", "target_walk")
SHARE = 0.10
"""The largest share of a 110M target's forward that each of ``CHEAP`` may take, at ``BAR``."""
BAR = (16_384, 8)
"""Vocabulary and nodes of that requirement."""
LAWS = (DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.IID, DraftSampling.DETERMINISTIC)
_PARAMETERS = 110e6


@dataclass(frozen=True)
class Case:
    """Drafts that rules are timed on.

    Attributes:
        name: In words.
        shape: Shape of every row's tree.
        law: How every node is drawn.
        tokens, p, q: Tables of all rows, in one tensor each, as in the engine.
    """

    name: str
    shape: TreeShape
    law: DraftSampling
    tokens: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    def tree(self) -> DraftTree:
        """The drafts, as a drafter of a static shape hands them over."""
        q = None if self.law is DraftSampling.DETERMINISTIC else self.q
        return DraftTree.from_shape(self.shape, self.tokens, sampling=self.law, draft_probs=q)


def make_case(nodes: int, vocab: int, batch: int, *, chain: bool, law: DraftSampling, seed: int = 0) -> Case:
    """Random tables and drafts drawn from them."""
    branches, length = SHAPES[nodes]
    shape = TreeShape.chain(nodes) if chain else TreeShape.branching(branches, *[1] * (length - 1))
    generator = torch.Generator().manual_seed(seed)
    size = (batch, shape.num_nodes + 1, vocab)
    # Log-probabilities of a text's next token are about that spread; the drafter's are its own, on top.
    logits = 2.5 * torch.randn(size, generator=generator)
    p = logits.softmax(-1)
    q = (logits + 0.8 * torch.randn(size, generator=generator)).softmax(-1)
    words = f"{'chain' if chain else f'{branches} x {length}'}, {law.name.lower().replace('_', ' ')}"
    return Case(words, shape, law, draw_tokens(shape, law, q, generator), p, q)


def draw_tokens(shape: TreeShape, law: DraftSampling, q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drafts from q, whose rows do not depend on what is drawn above them."""
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
    """A chain, of the first law that the rule takes; and trees of every sampled one, or of the deterministic one."""
    found: list[tuple[bool, DraftSampling]] = []
    branches, length = SHAPES[nodes]
    for chain in (True, False):
        shape = TreeShape.chain(nodes) if chain else TreeShape.branching(branches, *[1] * (length - 1))
        taken = []
        for law in LAWS:
            drafts = DraftSet((), Path(), "", "", 1.0, frozenset({law}), chain, shape.num_nodes, shape.max_depth, True)
            if refusal(rule, drafts) is None:
                taken.append(law)
        sampled = [law for law in taken if law is not DraftSampling.DETERMINISTIC]
        found += [(chain, law) for law in (taken[:1] if chain else sampled or taken)]
    return found


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of some calls, after two to warm up."""
    times = []
    for number in range(repeats + 2):
        begin = time.perf_counter()
        work()
        if number >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def time_rule(rule: Verifier, case: Case, repeats: int) -> float:
    """Seconds of a round's acceptance."""
    uniforms = torch.rand(len(case.tokens), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return seconds(lambda: accept(rule, case.tree(), case.p, uniforms), repeats)


def accepted_by(rules: Sequence[Verifier], case: Case, *, draws: int, limit: float = 1.0) -> list[float]:
    """Accepted tokens that rules expect, over the same drafts: ``draws``, or fewer after ``limit`` seconds.

    What a rule expects given one draft says little: it may lose on that one and win on average.
    """
    generator = torch.Generator().manual_seed(2)
    found: list[list[float]] = [[] for _ in rules]
    begin = time.perf_counter()
    for _ in range(draws):
        drawn = replace(case, tokens=draw_tokens(case.shape, case.law, case.q, generator))
        tree = drawn.tree()
        for values, rule in zip(found, rules, strict=True):
            values.append(float((rule.laws(tree, case.p).stop * tree.depth).sum(-1).mean()))
        if time.perf_counter() - begin > limit:
            break
    return [statistics.mean(values) for values in found]


def forward_seconds(vocab: int, nodes: int, batch: int, repeats: int) -> float:
    """A verify forward of a random 110M target in bf16, behind 128 tokens."""
    runner = ModelRunner(llama_110m(vocab), max_batch_size=batch, max_length=256, max_nodes=nodes)
    tokens = torch.randint(0, vocab, (batch, 128), generator=torch.Generator().manual_seed(0))
    slots, nothing, lengths = np.arange(batch), np.zeros(batch, dtype=np.int64), np.full(batch, 128)
    runner.run(ForwardBatch.of_chunk(tokens, host_slots=slots, host_lengths=nothing))
    drafted = torch.zeros(batch, nodes + 1, dtype=torch.long)
    tree = DraftTree.from_shape(TreeShape.chain(nodes), drafted)
    batch_of_trees = ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=lengths)
    return seconds(lambda: runner.run(batch_of_trees), repeats)


@dataclass(frozen=True)
class Row:
    """A rule on a case: its seconds and accepted tokens, and those of rejection sampling."""

    rule: str
    exactness: str
    vocab: int
    nodes: int
    batch: int
    case: str
    took: float
    accepted: float
    base_took: float
    base_accepted: float

    @property
    def pays(self) -> str:
        """From which length of a round on, in milliseconds; or in words."""
        cost, gain = self.took - self.base_took, self.accepted - self.base_accepted
        if self.rule == "rejection":
            return "-"
        if gain <= 1e-4:
            return "never" if cost > 0 else "cheaper"
        return "always" if cost <= 0 else f"{1e3 * break_even(cost, gain, self.base_accepted):.2f}"


def break_even(cost: float, gain: float, accepted: float) -> float:
    """Seconds that a round must take for ``cost`` more of them to be worth ``gain`` more tokens.

    (R + cost) / (accepted + 1 + gain) < R / (accepted + 1), solved for R: 1 ms more for 0.1 tokens on top of 2.0
    emitted ones pays where a round takes more than 20 ms.
    """
    return cost * (accepted + 1) / gain


def rows(
    rules: dict[str, Verifier],
    vocabularies: Sequence[int],
    nodes: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    draws: int = 64,
) -> Iterator[Row]:
    """All cases, rejection sampling timed beside every rule."""
    base = RejectionVerifier()
    for vocab in vocabularies:
        for count in nodes:
            for batch in batches:
                kinds = {kind for rule in rules.values() for kind in cases_of(rule, count)}
                for chain, law in sorted(kinds, reverse=True):
                    case = make_case(count, vocab, batch, chain=chain, law=law)
                    base_took = time_rule(base, case, repeats)
                    for name, rule in rules.items():
                        if (chain, law) not in cases_of(rule, count):
                            continue
                        try:
                            took = time_rule(rule, case, repeats)
                            accepted, base_accepted = accepted_by([rule, base], case, draws=draws)
                        except ValueError:  # a linear program is for tiny vocabularies
                            continue
                        yield Row(
                            name,
                            rule.exactness.value,
                            vocab,
                            count,
                            batch,
                            case.name,
                            took,
                            accepted,
                            base_took,
                            base_accepted,
                        )


COLUMNS = (
    Column("vocab"),
    Column("nodes"),
    Column("batch"),
    Column("drafts", "left"),
    Column("rule (exactness)", "left"),
    Column("ms"),
    Column("accepted"),
    Column("over\nrejection"),
    Column("of a 110M\nforward"),
    Column("pays from a\nround of, ms"),
    Column("or a\ntarget of"),
)
WIDTH = 160
"""Characters per line in a file or pipe: the table has many columns."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    rules: tuple[str, ...] = option(NAMES, "names of conf/verifier", choices=NAMES)
    vocabularies: tuple[int, ...] = option((4096, 32768, 131072), "sizes of the vocabulary", least=2)
    nodes: tuple[int, ...] = option((8, 16, 64), "drafted nodes", choices=tuple(SHAPES))
    batches: tuple[int, ...] = option((1, 8), "rows", least=1)
    repeats: int = option(7, "calls that are timed in each case", least=1)


def main() -> None:
    """Time the rules, and print one table and the requirement."""
    options = read_options(Options, __doc__)
    rules = make_rules(options.rules)
    console = terminal.console(WIDTH)
    with torch.inference_mode():
        forward = forward_seconds(*BAR, 1, options.repeats)
        title = (
            f"torch {torch.__version__}, {torch.get_num_threads()} threads; forward of a 110M target, bf16, "
            f"{BAR[1]} nodes, vocabulary {BAR[0]}, batch 1: {1e3 * forward:.1f} ms"
        )
        table = Table(COLUMNS, title)
        for row in rows(rules, options.vocabularies, options.nodes, options.batches, options.repeats):
            cells = row_cells(row, forward)
            table.add(*cells)
            # The table comes at the end, which may be many minutes away.
            line = " · ".join(cell.text for cell in cells[:7])
            console.print(f"{line} tokens", highlight=False, markup=False, style="dim")
        console.print(terminal.render(table))
        cheap = {name: rule for name, rule in rules.items() if name in CHEAP}
        for row in rows(cheap, BAR[:1], BAR[1:], [1], 3 * options.repeats, 1):
            share = row.took / forward
            word = "reached" if share <= SHARE else "MISSED"
            terminal.say(
                console,
                f"{row.rule}, {row.case}, vocabulary {row.vocab}, {row.nodes} nodes: {1e3 * row.took:.2f} ms, "
                f"{share:.1%} of the forward (<= {SHARE:.0%} {word})",
            )


def row_cells(row: Row, forward: float) -> list[Cell]:
    """A rule's figures on a case.

    Args:
        row: The figures.
        forward: Seconds of a forward of the 110M target.
    """
    pays = row.pays
    size = f"{float(pays) / 1e3 / forward * _PARAMETERS / 1e6:,.0f}M" if pays[0].isdigit() else ""
    emphasis = Emphasis.NONE if row.exactness == "exact" else Emphasis.LOSSY
    texts = [str(row.vocab), str(row.nodes), str(row.batch), row.case, f"{row.rule} ({row.exactness})"]
    texts += [f"{1e3 * row.took:.3f}", f"{row.accepted:.3f}", f"{row.accepted - row.base_accepted:+.3f}"]
    texts += [f"{row.took / forward:.1%}", pays, size]
    return [Cell(text, emphasis=emphasis if index == 4 else Emphasis.NONE) for index, text in enumerate(texts)]


if __name__ == "__main__":
    main()
