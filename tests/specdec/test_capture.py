"""Captured forwards: the eager forward's very numbers, and only where that is sure."""

from collections.abc import Iterator
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import specdec.execution.replay
from specdec.execution.frozen import all_known
from specdec.execution.packing import PackedLinears
from specdec.execution.recorder import Recordings
from specdec.execution.replay import _ForwardRecorder
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from tests.forwards import prefill, verify
from tests.models import ARCHITECTURES, tiny_model
from tests.verifiers.cases import complete

SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0)])
LENGTHS = np.array([9, 4])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", 1)


def runner_of(model: nn.Module, **kwargs: object) -> ModelRunner:
    runner = ModelRunner(model, max_batch_size=2, max_length=40, max_nodes=3, **kwargs)  # type: ignore[arg-type]
    tokens = torch.arange(2 * LENGTHS.max()).view(2, -1) % runner.vocab_size
    prefill(runner, tokens, np.zeros_like(LENGTHS))
    return runner


def captured(runner: ModelRunner) -> list[object]:
    """The programs that replace forwards."""
    return runner.executor.recordings.keys  # type: ignore[attr-defined]


def rounds(runner: ModelRunner, batch: int = 2, hidden_layers: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Logits of several rounds, each with other tokens, behind prefixes that grow."""
    lengths = LENGTHS[:batch].copy()
    for number in range(4):
        tokens = (torch.arange(4).repeat(batch, 1) * 7 + 5 * number + 1) % runner.vocab_size
        tree = DraftTree.from_shape(SHAPE, tokens)
        output = verify(runner, tree, lengths, wants=Wants(hidden_layers=hidden_layers))
        yield from (output.scores, *output.hidden_states.values())
        lengths += 1 + number


BY_DEFAULT = {("llama", 1), ("gemma2", 2), ("gpt2", 2), ("qwen2_mixed_sliding", 2)}


@pytest.mark.parametrize(
    ("architecture", "batch"),
    [*sorted(BY_DEFAULT), *(complete(each, 2, strong=False) for each in ARCHITECTURES if (each, 2) not in BY_DEFAULT)],
)
@torch.inference_mode()
def test_a_captured_forward_gives_what_the_model_gives(
    architecture: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(architecture)
    eager = list(rounds(runner_of(model), batch, (-1, 2)))
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", 1)
    runner = runner_of(model)
    replayed = list(rounds(runner, batch, (-1, 2)))
    assert captured(runner), "it was not captured"
    for a, b in zip(replayed, eager, strict=True):
        assert torch.equal(a, b)


def test_a_module_of_somebody_else_is_not_captured(at_once: None) -> None:
    class Scaled(nn.Linear):
        """Keeps a state that a captured forward would not see change."""

        factor = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.factor

    model = tiny_model("llama")
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Scaled(old.in_features, old.out_features, bias=False)
    assert not all_known(model.modules())
    runner = runner_of(model)
    first = list(rounds(runner))
    assert not captured(runner)
    Scaled.factor = 2.0
    assert not torch.equal(first[0], next(rounds(runner)))


CHANGES = {
    "": lambda tokens, states, times: states,
    "value": lambda tokens, states, times: states * 2 if int(tokens.sum()) > 3 else states,
    "list": lambda tokens, states, times: states * tokens[0].tolist()[0],
    "array": lambda tokens, states, times: states * float(np.asarray(tokens).sum()),
    "drawn": lambda tokens, states, times: states + torch.rand(states.shape),
    "constant": lambda tokens, states, times: states + torch.tensor(float(next(times))),
}
"""Work of which a part is not an operation on its inputs."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_could_not_be_repeated_is_not_captured(change: str) -> None:
    recordings, times = Recordings(_ForwardRecorder(PackedLinears(nn.Identity()), 50), after=1, most=9), count()
    tokens = torch.ones(1, 3, dtype=torch.long)

    def stage(tokens: Tensor, positions: Tensor) -> list[Tensor]:
        return [CHANGES[change](tokens, positions.float() + 1, times)]

    for _ in range(2):
        recordings.run("forward", "", stage, [tokens, tokens])
    assert len(recordings) == (change == "")


def test_without_memory_for_a_capture_the_model_runs_as_it_is(
    at_once: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.")
    monkeypatch.setattr(specdec.execution.replay, "fuse", Mock(side_effect=error))
    model = tiny_model()
    runner = runner_of(model)
    found = [*rounds(runner), *rounds(runner, batch=1)]
    assert not captured(runner)
    assert len(caplog.records) == 1 and "no memory is left for recordings" in caplog.text
    plain = runner_of(model, optimize=False)
    for one, other in zip(found, [*rounds(plain), *rounds(plain, batch=1)], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
