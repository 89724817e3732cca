"""Parity of forwards: what is counted, by hand and by mutants that are one bit off, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from experiments.commands import parity as command
from experiments.measuring import judged as judging
from experiments.measuring.parity import (
    Begin,
    Cell,
    compared,
    in_pieces,
    one_by_one,
    parity,
    through_model,
    through_runner,
)
from experiments.parity import parity as run_parity
from experiments.reporting.parity import remarks
from experiments.results.frame import Figures
from experiments.results.manifest import versions
from experiments.results.statistics import Bootstrap
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from tests.architectures import tiny
from tests.components import DRAFTERS
from verifiers.rejection import RejectionVerifier

Configure = Callable[..., DictConfig]
PROMPTS = torch.tensor([[5, 9, 2], [1, 1, 7], [30, 4, 8], [2, 60, 3]])


def one_bit_off(logits: Tensor) -> Tensor:
    """The same but for the last bit of a single logit."""
    bits = logits.clone().view(torch.int32)
    bits.view(-1)[7] ^= 1
    return bits.view(torch.float32)


def two_exchanged(logits: Tensor) -> Tensor:
    """The two likeliest tokens exchanged at a row's last place."""
    changed = logits.clone()
    order = logits[:, -1].topk(2).indices
    changed[:, -1].scatter_(1, order.flip(1), logits[:, -1].gather(1, order))
    return changed


def with_change(begin: Begin, change: Callable[[Tensor], Tensor]) -> Begin:
    """A way to run a model whose forwards over several tokens per row are changed."""

    def changed(prompts: Tensor) -> Any:
        step = begin(prompts)
        return lambda tokens, *tree: change(step(tokens, *tree)) if tokens.shape[1] > 1 else step(tokens, *tree)

    return changed


def exact() -> Begin:
    """A way whose forwards of all sizes have the same bits: a table of the last token alone."""
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return lambda prompts: lambda tokens, shape=None, path=(0,): table[tokens][:, list(path)]


def in_chains(begin: Begin, prompts: Tensor, outputs: Tensor, size: int) -> Tensor:
    """``in_pieces`` of so many tokens."""
    return in_pieces(begin, prompts, outputs, torch.zeros(*outputs.shape, 64), TreeShape.chain(size - 1))


def test_bits_flips_margins_and_lost_acceptance_are_counted() -> None:
    plain = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(1))
    assert (same := compared(plain, plain.clone())).bits == same.lost == same.flips == 0 and same.parted == [None, None]
    one = compared(plain, one_bit_off(plain))
    assert (one.logits, one.bits, one.flips) == (1 / 600, 1 / 600 / 32, 0) and 0 < one.largest < 1e-6
    assert compared(plain.bfloat16(), -plain.bfloat16()).bits == 1 / 16  # the sign's

    other = plain.clone()
    order = plain[1, 4].topk(2).indices
    other[1, 4, order], margin = plain[1, 4, order.flip(0)], float(plain[1, 4].topk(2).values.diff().abs())
    found = compared(plain, other)
    assert found.flips == 1 and found.parted == [None, 4] and found.flipped == pytest.approx(margin)
    assert [each.flips for each in found.by_margin] == [
        margin < 0.01,
        0.01 <= margin < 0.1,
        0.1 <= margin < 1,
        margin >= 1,
    ]
    assert sum(each.places for each in found.by_margin) == 12
    # The drafter that drafts by the plain law loses most: acceptance of any q is the sum of min(p, q).
    before, after = plain.softmax(-1), other.softmax(-1)
    assert found.lost == pytest.approx(float(1 - torch.minimum(before, after).sum(-1).mean()), abs=1e-6)
    for seed in range(50):
        q = (plain + torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)
        lost = torch.minimum(q, before).sum(-1) - torch.minimum(q, after).sum(-1)
        assert abs(float(lost.mean())) <= found.lost + 1e-6


def test_forwards_that_are_one_bit_off_are_counted_and_exact_ones_are_not() -> None:
    shapes = [None, TreeShape.chain(1), TreeShape.chain(3), TreeShape.branching(2, 2)]
    cells = [Cell(batch, shape) for batch in (1, 2) for shape in shapes if batch > 1 or shape is not None]
    sizes: dict[str, Any] = {"tokens": 8, "cells": cells}
    rows = list(parity(exact(), PROMPTS, **sizes))
    assert [(row.batch, row.size) for row in rows] == [(1, 2), (1, 4), (1, 7), (2, 1), (2, 2), (2, 4), (2, 7)]
    assert all(not row.bits and row.places == 32 and row.parted == [None] * 4 for row in rows)
    for row in parity(with_change(exact(), one_bit_off), PROMPTS, **sizes):
        # Trees of two levels take 3 tokens of the text at once, the last one of 8 only two.
        forwards = {1: 0, 2: 4, 4: 2, 7: 3}[row.size] * 4 // row.batch
        assert row.logits == forwards / (32 * 64) and row.flips == 0


def test_a_difference_in_trees_alone_is_said() -> None:
    def in_trees(logits: Tensor) -> Tensor:
        return one_bit_off(logits) if logits.shape[1] == 3 else logits

    cells = [Cell(1, TreeShape.chain(3)), Cell(1, TreeShape.branching(2, 2), "[2,2]")]
    ways = {"first": exact(), "second": with_change(exact(), in_trees), "third": with_change(exact(), one_bit_off)}
    found = [
        Figures(engine=name, dtype="", quantization=None, control=False) | row
        for name, begin in ways.items()
        for row in parity(begin, PROMPTS, tokens=8, cells=cells)
    ]
    assert remarks(found, [])[1:] == [
        "The same bits however many tokens are in a forward: first always.",
        "The same bits in chains of tokens, not in trees: second always.",
    ]


def test_the_text_takes_every_path_of_a_tree_among_the_likeliest_other_tokens() -> None:
    begin, shape, seen = exact(), TreeShape.of([[0], [1], [2], [0, 0], [1, 0], [1, 1]]), []

    def watched(prompts: Tensor) -> Any:
        def step(tokens: Tensor, shape: TreeShape | None = None, path: Any = (0,)) -> Tensor:
            seen.append((tokens, shape, list(path)))
            return begin(prompts)(tokens, shape, path)

        return step

    outputs, plain = one_by_one(begin, PROMPTS, 11)
    in_pieces(watched, PROMPTS, outputs, plain, shape)
    assert [path for *_, path in seen] == [[0, 1, 4], [0, 2, 5], [0, 2, 6], [0, 1]]  # of the last, one level is left
    text, at = torch.cat([PROMPTS[:, -1:], outputs], 1), 0
    for tokens, tree, path in seen:
        assert torch.equal(tokens[:, path], text[:, at : at + len(path)])
        for level in range(1, len(path)):
            likely = plain[:, at + level - 1].topk(3).indices
            for parent, children in enumerate(tree.children):
                if children and tree.depths[parent] == level - 1:
                    for row in range(len(tokens)):  # no sibling twice, and no token that is less likely
                        assert set(tokens[row, list(children)].tolist()) == set(likely[row, : len(children)].tolist())
        at += len(path)


def test_the_first_flip_is_where_greedy_rounds_part_from_plain_decoding() -> None:
    size, count = 4, 11
    begin = with_change(exact(), two_exchanged)
    for prompt in PROMPTS.split(1):
        plain, logits = one_by_one(begin, prompt, count)
        found = compared(logits, in_chains(begin, prompt, plain, size))
        # Rounds: the root and the plain output's next tokens as drafts; what is accepted, and one more, is emitted.
        output: list[int] = []
        while len(output) < count:
            drafts = plain[0, len(output) : len(output) + size - 1].tolist()
            fed = torch.tensor([[([int(prompt[0, -1]), *output])[-1], *drafts]])
            chain = None if fed.shape[1] == 1 else TreeShape.chain(fed.shape[1] - 1)
            said = begin(prompt)(fed, chain, range(fed.shape[1])).argmax(-1)[0].tolist()
            agreed = next((at for at, (a, b) in enumerate(zip(drafts, said, strict=False)) if a != b), len(drafts))
            output += said[: agreed + 1]
            if output != plain[0, : len(output)].tolist():
                break
        parted = next(at for at, (a, b) in enumerate(zip(output, plain[0].tolist(), strict=False)) if a != b)
        assert found.parted == [parted] == [3]


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_both_ways_compute_what_one_forward_over_the_whole_text_does(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tree = tiny(architecture), TreeShape.branching(2, 2, 1)
    runner = ModelRunner(model, max_batch_size=4, max_length=16, max_nodes=tree.num_nodes)
    for begin, shapes in (
        (through_runner(runner), [None, TreeShape.chain(2), tree]),
        (through_model(model), [None, TreeShape.chain(2)]),
        (through_runner(runner), [tree]),
    ):
        outputs, plain = one_by_one(begin, PROMPTS, 7)
        with torch.inference_mode():
            whole = model(torch.cat([PROMPTS, outputs[:, :-1]], 1)).logits[:, 2:]
        torch.testing.assert_close(plain, whole, atol=2e-3, rtol=1e-3)
        for shape in shapes:
            found = in_pieces(begin, PROMPTS, outputs, plain, shape)
            torch.testing.assert_close(found, whole, atol=2e-3, rtol=1e-3)
    commit = runner.cache.commit  # a tree of which another path stays is found out
    monkeypatch.setattr(runner.cache, "commit", lambda slots, at, path: commit(slots, at, path - (path > 1).long()))
    assert (in_pieces(through_runner(runner), PROMPTS, outputs, plain, tree) - whole).abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "model_chain_iid"), ("llama", "model_tree_without_replacement"), ("lfm2", "model_chain_iid")],
)
def test_drafts_are_judged_with_either_forward(architecture: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny(architecture))
    given: dict[str, Any] = {"max_new_tokens": 9, "seed": 3, "ignore_eos": True}
    sampled, greedy = SamplingParams(temperature=1.0, **given), SamplingParams(**given)
    for invariant in (True, False) if architecture == "llama" else (False,):  # its short convolutions are refused
        engine = Engine(target, DRAFTERS[name](target.model), RejectionVerifier(), max_length=16, invariant=invariant)
        found = judging.judged(engine, PROMPTS, sampled, Bootstrap())
        assert 0 < found.by_one < 1 and abs(found.lost) < 1e-4 and (not invariant or found.changed == 0)
    output = engine.generate([PROMPTS[0].tolist()], greedy)[0]
    found = judging.judged(engine, PROMPTS[:1], greedy, Bootstrap())
    groups, at = 0, 0
    for step in output.steps:  # every accepted node and the first that is not, as deep as tokens are still wanted
        groups += min(step.accepted + 1, DRAFTERS[name](target.model).max_depth, 9 - at - 1)
        at += step.accepted + 1
    assert found.groups == groups and found.by_round == pytest.approx(sum(s.accepted for s in output.steps) / groups)

    def warm(runner: ModelRunner) -> Any:
        begin = through_runner(runner)
        return lambda prompts: (lambda step: lambda *given: step(*given) / 1.5)(begin(prompts))

    before = judging.judged(engine, PROMPTS, sampled, Bootstrap())
    monkeypatch.setattr(judging, "through_runner", warm)  # p of one token at a time is another one
    after = judging.judged(engine, PROMPTS, sampled, Bootstrap())
    assert after.by_round == before.by_round and after.changed > 5 and abs(after.lost) > 1e-3
    assert after.interval is not None and after.interval[0] < after.lost < after.interval[1]


@pytest.fixture
def words(saved: Path, tmp_path: Path) -> list[str]:
    given = [
        f"target.name={saved / 'target'}",
        "dataset.count=3",
        "threads=1",
        "tokens=6",
        "prompt_tokens=8",
        "batch=[1,2]",
    ]
    ways = ["~engines.specdec_eager_attention", "~engines.specdec_torch_products"]
    return [
        *given,
        *ways,
        "dtypes=[float32]",
        "quantizations=[null]",
        "sizes=[2,4]",
        "trees=[[2,2]]",
        f"out={tmp_path / 'out'}",
    ]


def test_the_command_measures_every_way_and_says_when_the_control_is_not_zero(
    configure: Configure, saved: Path, words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = ["drafter=model", f"drafter.name={saved / 'drafter'}", "drafter.shape=[2,1]"]
    rows = run_parity(configure("parity", *words, *drafts))
    file = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [row.get("bits") for row in file["rows"]] == [row.get("bits") for row in rows] and file["left_out"] == []
    control = [row for row in rows if row.control]
    assert all("drafts" in row or row.bits == 0 for row in control) and len(control) == 8
    assert [row.tree for row in control[:-1]] == [None, None, "[2,2]"] + [None] * 3 + ["[2,2]"]
    assert [row.engine for row in rows if "drafts" in row] == ["specdec", "specdec_invariant"]
    assert all(not each.changed for each in control[-1].judged) and control[-1].judged[0].groups > 5
    assert (tmp_path / "out" / "parity.png").stat().st_size > 10_000
    said = " ".join(capsys.readouterr().out.split())
    assert "The control (specdec invariant float32) gives the same bits" in said
    assert "Drafts of ModelDrafter judged with either forward" in said and "in the draft tree [2,2]" in said

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
    with pytest.raises(ValueError, match=r"holds the results of another comparison: .* resume=true"):
        run_parity(configure("parity", *words))
    words[-1] += "2"
    monkeypatch.setattr(command, "through_runner", lambda runner: with_change(through_runner(runner), one_bit_off))
    run_parity(configure("parity", *words))
    assert "THE CONTROL DIFFERS: specdec invariant float32" in " ".join(capsys.readouterr().out.split())

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words[-1] += "2"
    rows = run_parity(configure("parity", *words, "+engines.specdec.attention=triton"))  # not for a CPU
    assert "specdec" not in {row.engine for row in rows} and "transformers" in {row.engine for row in rows}
    assert "Left out: specdec float32 (" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_comparison_goes_on(
    configure: Configure, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
    whole = run_parity(configure("parity", *words[:-1], f"out={tmp_path / 'whole'}"))
    forwards, again = [0], [*words, "resume=true"]
    original = command.measured

    def measured(*given: Any, **more: Any) -> Any:
        for row in original(*given, **more):
            forwards[0] += 1
            if forwards[0] in (3, 11):
                raise KeyboardInterrupt if forwards[0] == 3 else OSError("a disk is full")
            yield row

    monkeypatch.setattr(command, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        run_parity(configure("parity", *words))
    assert len(json.loads((tmp_path / "out" / "parity.json").read_text())["rows"]) == 2
    with (tmp_path / "out" / "rows.jsonl").open("a") as file:
        file.write('{"engine": "spec')  # it was killed while it wrote
    with pytest.raises(ValueError, match="had tokens=6, and this one has tokens=8"):
        run_parity(configure("parity", *again, "tokens=8"))
    build = command.build
    monkeypatch.setattr(command, "build", None)  # nothing is loaded
    for changed, said in (
        (("device_name", lambda device: "another"), "had device .*, now another: its results cannot be continued"),
        (("versions", lambda: {**versions(), "torch": "9.9"}), r"had torch .*, now 9\.9: its results"),
        (("settle", lambda config: torch.set_num_threads(2)), "had threads 1, now 2: its results"),
    ):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(command, *changed)
            with pytest.raises(ValueError, match=said):
                run_parity(configure("parity", *again))
    monkeypatch.setattr(command, "build", build)
    with pytest.raises(OSError, match="a disk is full"):
        run_parity(configure("parity", *again))
    assert run_parity(configure("parity", *again)) == whole and forwards[0] == len(whole) + 2
    monkeypatch.delattr(command, "measured")  # nothing is left to do
    assert run_parity(configure("parity", *again)) == whole


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("+engines.specdec.atention=eager", "engines.specdec: there is no atention: did you mean"),
        ("engines.transformers=eager", "engines.transformers=eager: give arguments of ModelRunner"),
        ("batch=[8]", "a batch needs as many prompts"),
        ("prompt_tokens=4000", "positions, give at most so many together"),
        ("sizes=[1]", "sizes"),
        ("trees=[[0]]", "branching factors"),
        ("+contenders={openai:{_target_:experiments.contenders.openai.OpenAIServer}} drafter=ngram", "leave one out"),
        ("resume=true", "there is no comparison in"),
        ("dtypes=[int8]", "dtypes"),
        ("quantizations=[int3]", "int3"),
        ("max_minutes=1e-9", r"nothing was measured: specdec float32, .*\(max_minutes=1e-09; resume=true"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(configure: Configure, words: list[str], wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_parity(configure("parity", *words, *wrong.split()))
