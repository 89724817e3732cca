"""Records and folders of runs that nobody ran; one has every kind of token, a trace, trees and hostile texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import Job
from experiments.measuring.watch import trace_keys
from experiments.results.frame import frame_of
from experiments.results.records import Record, begin_records
from experiments.results.runs import Run, load_run
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize
from experiments.results.texts import TOKENS, write_prompts
from experiments.tracing.trace import TraceKey, TraceWriter
from specdec import DraftSampling, DraftTree, Exactness, SamplingParams, Verdict
from specdec.acceptance import path_to
from specdec.interfaces import Round
from specdec.requests import Request


def output(prompt: str = "a", method: str = "fast", *, tokens: int = 3, **fields: Any) -> Record:
    """One output of an exact rule, or of none (``plain``); its rounds are those of ``accepted``, no more is drafted."""
    accepted = fields.get("accepted", (0,))
    depth = fields.get("proposed_depth", accepted)
    filled: dict[str, Any] = {
        "prompt": prompt, "method": method, "exactness": None if method == "plain" else "exact", "temperature": 0.0,
        "batch": 0, "prompt_tokens": 5, "token_ids": tuple(range(tokens)), "finish_reason": "length", "seconds": 1.0,
        "accepted": accepted, "expected_accepted": tuple(map(float, accepted)),
        "proposed_depth": depth, "proposed_nodes": depth,
    }  # fmt: skip
    return Record(**filled | fields)


def moments(*emissions: tuple[float, int], arrived: float = 0.0, admitted: float = 0.0, prefilled: float = 0.0) -> Any:
    """Fields of a request whose host saw so many tokens at these moments."""
    moments, counts = zip(*emissions, strict=True)
    told = {"arrived": arrived, "admitted": admitted, "prefilled": prefilled, "finished": moments[-1]}
    return told | {"token_ids": tuple(range(sum(counts))), "emitted_at": moments, "emitted": counts}


def manifest_of(
    *overrides: str, prompts: int = 3, config: Mapping[str, Mapping[str, Any]] | None = None, **facts: object
) -> dict[str, Any]:
    """The manifest of a run on three prompts; ``config`` has what sections have besides, or instead."""
    sections: dict[str, Mapping[str, Any]] = {"engine": {"max_batch_size": 1}}
    sections["dataset"] = {"_target_": "experiments.datasets.stdlib.Stdlib", "seed": 0}
    sections["bootstrap"] = {"confidence": 0.95, "resamples": 100, "seed": 0}
    return {
        "config": sections | {name: {**sections.get(name, {}), **more} for name, more in (config or {}).items()},
        "target": {"name": "bundled/target"}, "prompts": prompts, "prompts_hash": "abc", "dtype": "float32",
        "device": "a processor", "planned": 3, "series": 2, "overrides": list(overrides),
        "git": {"commit": "0123456789abcdef", "dirty": False},
    } | facts  # fmt: skip


def made(
    folder: Path, *overrides: str, prompts: int = 3, pace: float = 1.0, records: Iterable[Record] = (), **facts: Any
) -> Path:
    """The folder of a run with these records, or with those of plain decoding and ``model``, which may take longer."""
    temperature = next((float(o.rpartition("=")[2]) for o in overrides if "sampling.temperature" in o), 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest_of(*overrides, prompts=prompts, **facts)))
    written = list(records)
    for number in range(0 if written else prompts):
        shared: dict[str, Any] = {"tokens": 6, "temperature": temperature, "batch": number}
        written.append(output(f"p{number}", "plain", seconds=2.0, accepted=(0,) * 6, **shared))
        drafted = {"accepted": (2, 1, number % 2), "proposed_depth": (2,) * 3, "proposed_nodes": (4,) * 3}
        written.append(output(f"p{number}", "model", seconds=pace * (1.0 + number / 10), **drafted, **shared))
    begin_records(folder / "records.jsonl", written)
    return folder


def run_of(records: Iterable[Record], **more: Any) -> Run:
    """A run that has these records, and no folder."""
    outputs = frame_of(records)
    settings = {"planned": 2, "bootstrap": Bootstrap(resamples=200)} | more
    return Run(Path("x"), manifest_of(), summarize(outputs, **settings), outputs)


def loaded(folder: Path, *overrides: str, **facts: Any) -> Run:
    return load_run(made(folder, *overrides, **facts))


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


def tables(seed: int) -> tuple[Tensor, Tensor]:
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
        drafted, above = torch.tensor([[tokens], [parents]])
        tree = DraftTree.build(drafted, above, sampling=DraftSampling.IID, draft_probs=q)
        path = path_to(tree, torch.tensor([stop]))
        accepted = int((path >= 0).sum())
        told = {"num_accepted": accepted, "expected_accepted": 1.0, "next_token": following, "valid": True}
        verdict = Verdict(path=path, **{name: torch.tensor([value]) for name, value in told.items()})
        key = TraceKey(
            method="model", exactness="exact", temperature=temperature, prompt=name, turn=0, sample=0,
            round=number, accepted=accepted, expected_accepted=1.0, stop=stop, next_token=following,
        )  # fmt: skip
        writer.add(Round(tree, p, verdict, (None,)), [key])


def traced(folder: Path, tree: DraftTree, p: Tensor, prompts: Sequence[str], dropped: float = 0.0) -> None:
    """A trace of one round, of as many prompts as the tree has rows."""
    drawn = [SamplingParams(temperature=1.0, stream=row) for row in range(len(prompts))]
    jobs = {row: Job(Prompt(id=name, turns=("",)), row, (1,), drawn[row]) for row, name in enumerate(prompts)}
    zeros = torch.zeros(len(prompts), dtype=torch.long)
    verdict = Verdict(zeros[:, None], zeros, expected_accepted=zeros.float(), next_token=zeros, valid=zeros == 0)
    seen = Round(tree, p, verdict, tuple(Request(row, [1], each, True, frozenset()) for row, each in enumerate(drawn)))
    writer = TraceWriter(folder, dropped=dropped)
    writer.add(seen, trace_keys(seen, "model", Exactness.EXACT, jobs))
    writer.flush()
