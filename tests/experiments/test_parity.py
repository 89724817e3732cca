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
from experiments.measuring.parity import (
    Begin,
    compared,
    in_pieces,
    one_by_one,
    parity,
    through_model,
    through_runner,
)
from experiments.parity import parity as run_parity
from specdec.target.runner import ModelRunner
from tests.architectures import tiny

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

    def changed(prompts: Tensor) -> Callable[[Tensor], Tensor]:
        step = begin(prompts)
        return lambda tokens: change(step(tokens)) if tokens.shape[1] > 1 else step(tokens)

    return changed


def exact() -> Begin:
    """A way whose forwards of all sizes have the same bits: a table of the last token alone."""
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return lambda prompts: lambda tokens: table[tokens]


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
    sizes: dict[str, Any] = {"tokens": 8, "batches": [1, 2], "sizes": [2, 4]}
    rows = list(parity(exact(), PROMPTS, **sizes))
    assert [(row.batch, row.size) for row in rows] == [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    assert all(not row.bits and row.places == 32 and row.parted == [None] * 4 for row in rows)
    for row in parity(with_change(exact(), one_bit_off), PROMPTS, **sizes):
        forwards = 0 if row.size == 1 else 4 // row.batch * 8 // row.size
        assert row.logits == forwards / (32 * 64) and row.flips == 0


def test_the_first_flip_is_where_greedy_rounds_part_from_plain_decoding() -> None:
    size, count = 4, 11
    begin = with_change(exact(), two_exchanged)
    for prompt in PROMPTS.split(1):
        plain, logits = one_by_one(begin, prompt, count)
        found = compared(logits, in_pieces(begin, prompt, plain, size))
        # Rounds: the root and the plain output's next tokens as drafts; what is accepted, and one more, is emitted.
        output: list[int] = []
        while len(output) < count:
            drafts = plain[0, len(output) : len(output) + size - 1].tolist()
            fed = torch.tensor([[([int(prompt[0, -1]), *output])[-1], *drafts]])
            said = begin(prompt)(fed).argmax(-1)[0].tolist()
            agreed = next((at for at, (a, b) in enumerate(zip(drafts, said, strict=False)) if a != b), len(drafts))
            output += said[: agreed + 1]
            if output != plain[0, : len(output)].tolist():
                break
        parted = next(at for at, (a, b) in enumerate(zip(output, plain[0].tolist(), strict=False)) if a != b)
        assert found.parted == [parted] == [3]


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_both_ways_compute_what_one_forward_over_the_whole_text_does(architecture: str) -> None:
    model = tiny(architecture)
    runner = ModelRunner(model, max_batch_size=4, max_length=16, max_nodes=3)
    for begin in (through_runner(runner), through_model(model), through_runner(runner)):
        outputs, plain = one_by_one(begin, PROMPTS, 7)
        with torch.inference_mode():
            whole = model(torch.cat([PROMPTS, outputs[:, :-1]], 1)).logits[:, 2:]
        torch.testing.assert_close(plain, whole, atol=2e-3, rtol=1e-3)
        for size in (1, 3):
            torch.testing.assert_close(in_pieces(begin, PROMPTS, outputs, size), whole, atol=2e-3, rtol=1e-3)


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
    ways = ["~engines.specdec_eager", "~engines.specdec_torch"]
    return [*given, *ways, "dtypes=[float32]", "quantizations=[null]", "sizes=[2,4]", f"out={tmp_path / 'out'}"]


def test_the_command_measures_every_way_and_says_when_the_control_is_not_zero(
    configure: Configure, words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_parity(configure("parity", *words))
    file = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [row["bits"] for row in file["rows"]] == [row.bits for row in rows] and file["left_out"] == []
    assert all(row.bits == 0 for row in rows if row.control) and len([row for row in rows if row.control]) == 5
    assert (tmp_path / "out" / "parity.png").stat().st_size > 10_000
    assert "The control (specdec invariant float32) gives the same bits" in " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
    monkeypatch.setattr(command, "through_runner", lambda runner: with_change(through_runner(runner), one_bit_off))
    run_parity(configure("parity", *words))
    assert "THE CONTROL DIFFERS: specdec invariant float32" in " ".join(capsys.readouterr().out.split())

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = run_parity(configure("parity", *words, "+engines.specdec.attention=triton"))  # not for a CPU
    assert "specdec" not in {row.engine for row in rows} and "transformers" in {row.engine for row in rows}
    assert "Left out: specdec float32 (" in " ".join(capsys.readouterr().out.split())

    def interrupt(model: Any) -> Begin:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "through_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_parity(configure("parity", *words))
    file = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert {row["engine"] for row in file["rows"]} == {"specdec", "specdec_invariant"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("+engines.specdec.atention=eager", "engines.specdec: there is no atention: did you mean"),
        ("batch=[8]", "a batch needs as many prompts"),
        ("prompt_tokens=4000", "positions, give at most so many together"),
        ("sizes=[1]", "sizes"),
        ("dtypes=[int8]", "dtypes"),
        ("quantizations=[int3]", "int3"),
        ("max_minutes=1e-9", r"nothing was measured: specdec float32, .*\(max_minutes=1e-09\)"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(configure: Configure, words: list[str], wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_parity(configure("parity", *words, wrong))
