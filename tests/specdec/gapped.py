"""Three prompts, and a drafter that knows their outputs."""

import torch

from specdec.batch import Batch
from specdec.interfaces import StatelessDrafter
from specdec.requests import SamplingParams
from specdec.tree import DraftTree
from specdec.types import DraftSampling

VOCAB = 64
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


class Gapped(StatelessDrafter):
    """Drafts a chain without siblings in which another, invalid node stands in front."""

    max_nodes, max_depth, is_chain = 3, 2, True
    reads_host = True
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, outputs: list[tuple[int, ...]]):
        self.outputs = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]

    def propose(self, batch: Batch) -> DraftTree:
        rows = []
        for row, length in enumerate(batch.on_host.lengths.tolist()):
            so_far = batch.on_host.tokens[row, : length + 1].tolist()
            whole = next(output for output in self.outputs if output[: length + 1] == so_far)
            rows.append([so_far[-1], 0, *[*whole, 0, 0][length + 1 : length + 3]])
        parents = torch.tensor([[-1, 0, 0, 2]]).expand(len(rows), -1)
        valid = torch.tensor([[True, False, True, True]]).expand(len(rows), -1)
        return DraftTree.build(torch.tensor(rows), parents, valid=valid, max_children=1)
