"""Traces of rounds that a test has made up."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import Job
from experiments.measuring.watch import trace_keys
from experiments.tracing.trace import TraceWriter
from specdec import DraftTree, Exactness, SamplingParams, Verdict
from specdec.interfaces import Round
from specdec.requests import Request


def traced(folder: Path, tree: DraftTree, p: Tensor, prompts: Sequence[str], dropped: float = 0.0) -> None:
    """A trace of one round, of as many prompts as the tree has rows."""
    jobs = {
        row: Job(Prompt(id=prompt, turns=("",)), row, (1,), SamplingParams(temperature=1.0, stream=row))
        for row, prompt in enumerate(prompts)
    }
    zeros = torch.zeros(len(prompts), dtype=torch.long)
    verdict = Verdict(
        path=zeros[:, None], num_accepted=zeros, expected_accepted=zeros.float(), next_token=zeros, valid=zeros == 0
    )
    requests = tuple(Request(row, [1], job.sampling, True, frozenset()) for row, job in jobs.items())
    writer = TraceWriter(folder, dropped=dropped)
    seen = Round(tree, p, verdict, requests)
    writer.add(seen, trace_keys(seen, "model", Exactness.EXACT, jobs))
    writer.flush()
