"""A small run, written by hand: every kind of token, a trace, a tree, broken characters, and hostile texts."""

import json
from pathlib import Path
from typing import Any

import torch

from experiments.datasets.prompt import Prompt
from experiments.results.records import Record
from experiments.results.texts import TOKENS, write_prompts
from experiments.tracing.trace import TraceKey, TraceWriter
from specdec import DraftSampling, DraftTree, Verdict
from specdec.acceptance import path_to
from specdec.interfaces import Round
from tests.experiments.made_runs import made
from tests.experiments.results.outputs import output

HOSTILE = "</script><img src=x onerror=document.title=1>"
VOCAB = 8
TEXTS = {0: "<s>", 1: " a", 2: HOSTILE, 3: [0xE2], 4: [0x86, 0x92], 5: "\n", 6: " bad", 7: "<b>"}
# Every round's tokens and parents, the node at which its path ends, and the token that followed.
ROUNDS = (
    ([1, 2, 3], [-1, 0, 1], 2, 4),  # all of a chain: 4 is a bonus
    ([4, 5, 6, 6], [-1, 0, 0, 1], 1, 7),  # node 3 below the path's end was rejected: 7 is recovered
    ([7, 6, 2, 3], [-1, 0, 0, 1], 2, 1),  # a leaf that is not the deepest: 1 is a bonus
)
OUTPUT = (2, 3, 4, 5, 7, 2, 1)


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q at the nodes of a round, and of more than it may have."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(4, VOCAB, generator=generator).softmax(-1) for _ in range(2))
    return p, q


def write_run(folder: Path, *, prompts: int = 3, trace: bool = True, temperature: float = 1.0, **facts: Any) -> Path:
    """The folder of a run of plain decoding and ``model``; the last prompt is hostile in all its texts.

    With ``temperature=0`` the model's first output leaves plain decoding where no tie explains it, its second at a tie.
    """
    own: dict[str, Any] = {"target": {"name": "nobody/nothing", "parameters": 1_500_000}, "threads": 1}
    own |= {"planned": prompts, "git": {"commit": "0123456789abcdef", "dirty": True}}
    ids = [f"p{number}" for number in range(prompts - 1)] + [f"last {HOSTILE}"]
    records = [record for number, name in enumerate(ids) for record in _records(name, number, temperature)]
    made(folder, f"out={folder}", prompts=prompts, records=records, **own | facts)
    (folder / TOKENS).write_text(json.dumps({str(token): text for token, text in TEXTS.items()}))
    write_prompts(folder, [Prompt(id=name, turns=(f"say {name}",), category="c") for name in ids])
    writer = TraceWriter(folder, dropped=0.0)
    for name in ids if trace else ():
        _trace(writer, name, temperature)
    writer.flush()
    return folder


def _records(name: str, number: int, temperature: float) -> tuple[Record, Record]:
    shared: dict[str, Any] = {"category": f"c{number % 2}", "temperature": temperature, "batch": number}
    shared |= {"token_ids": OUTPUT, "text": "text"}
    drafted: dict[str, Any] = {"accepted": (2, 1, 1), "expected_accepted": (1.5, 1.0, 0.5)}
    drafted |= {"proposed_depth": (2, 2, 2), "proposed_nodes": (2, 3, 3)}
    if temperature == 0:
        divergence, margin = {0: (3, 0.5), 1: (2, 1e-7)}.get(number, (None, None))
        drafted |= {"equals_plain": divergence is None, "divergence": divergence, "margin": margin}
        drafted["tie_bound"] = margin and 1e-5
    plain = output(name, "plain", accepted=(0,) * 7, seconds=2.0 + number, **shared)
    return plain, output(name, "model", seconds=1.0, **drafted, **shared)


def _trace(writer: TraceWriter, name: str, temperature: float) -> None:
    for number, (tokens, parents, stop, following) in enumerate(ROUNDS):
        p, q = (table[: len(tokens)][None] for table in tables(number))
        tree = DraftTree.build(
            torch.tensor([tokens]), torch.tensor([parents]), sampling=DraftSampling.IID, draft_probs=q
        )
        path = path_to(tree, torch.tensor([stop]))
        accepted = int((path >= 0).sum())
        told = {"num_accepted": accepted, "expected_accepted": 1.0, "next_token": following, "valid": True}
        verdict = Verdict(path=path, **{name: torch.tensor([value]) for name, value in told.items()})
        key = TraceKey(
            method="model", exactness="exact", temperature=temperature, prompt=name, turn=0, sample=0,
            round=number, accepted=accepted, expected_accepted=1.0, stop=stop, next_token=following,
        )  # fmt: skip
        writer.add(Round(tree, p, verdict, (None,)), [key])
