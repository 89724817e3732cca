"""Whether what an engine drafts in its rounds is a reference's law: ragged rows, refilled slots, prompts in pieces."""

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.heads.training import Anchors, TargetStates, TextBatch, TrainedHead
from specdec import Drafter, Engine, SamplingParams, Target
from specdec.interfaces import Round
from tests.forwards import inner_paths
from tests.shapes import shapes_unchecked
from verifiers import RejectionVerifier

PROMPTS = [[1, 2, 3, 1, 2, 5, 9, 4, 7], [5], [6, 2], [3, 3, 8, 1, 4, 20, 11]]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=10)
Law = Callable[[list[int], list[int]], Tensor]
"""The distribution behind a sequence and a path of drafted tokens, which begins with the sequence's last one."""


def agreements(
    target: Target, drafter: Drafter, law: Law, *, prompts=PROMPTS, sampling=SAMPLED, atol=2e-4, **options: object
) -> tuple[list[tuple[int, bool]], int]:
    """The depth of every node with drafted children and whether q is the law there; and how much was accepted."""
    found: list[tuple[int, bool]] = []

    @torch.inference_mode()
    def look(seen: Round) -> None:
        for row, request in enumerate(seen.requests):
            if request is None or seen.tree.draft_probs is None:  # no room was left for a draft
                continue
            known = [*request.prompt_ids, *request.output_ids]
            for node, path in inner_paths(seen.tree, row).items():
                same = torch.allclose(seen.tree.draft_probs[row, node], law(known, path), atol=atol, rtol=0)
                found.append((len(path) - 1, same))

    sizes = {"max_batch_size": 2, "max_length": 48, "prefill_chunk": 4} | options
    with shapes_unchecked(), Engine(target, drafter, RejectionVerifier(), **sizes) as engine:
        engine.on_round = look
        outputs = engine.generate(list(prompts), sampling)
    return found, sum(step.accepted for output in outputs for step in output.steps)


def compared(head: TrainedHead, law: Callable[[Tensor, list[int]], Tensor]) -> int:
    """Compares what a head is trained on, over two packed documents, with the logarithms of a law; and counts this."""
    tokens = torch.randint(64, (1, 14), generator=torch.Generator().manual_seed(1))
    documents, positions = torch.tensor([[0] * 8 + [1] * 6]), torch.tensor([[*range(8), *range(6)]])
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), documents, positions)
    hidden = torch.randn(1, 14, 32, generator=torch.Generator().manual_seed(2))
    anchors, count = Anchors.everywhere(batch, 3), 0
    found = head(batch, TargetStates({-1: hidden}, torch.nn.Identity()), anchors)
    for row, root in enumerate(anchors.index.tolist()):
        states = hidden[0, 0 if root < 8 else 8 : root]
        for depth in range(int(anchors.valid[row].sum())):
            mine = head.logits(found.states[depth][row : row + 1], tokens[0, root + depth][None], depth + 1)[0]
            wanted = law(states, tokens[0, root : root + depth + 1].tolist())
            torch.testing.assert_close(mine.log_softmax(-1), wanted, rtol=1e-3, atol=1e-4)
            count += 1
    return count
