"""A forward as a value, and captured forwards: the eager forward's very numbers, and only where that is sure."""

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import specdec.execution.forwards
from drafters import NGramDrafter
from specdec import DraftTree, Engine, ForwardBatch, ModelRunner, SamplingParams, Target, Topology, TreeShape, Wants
from specdec.attention import EagerAttention
from specdec.execution.forwards import CurrentForward, _ForwardRecorder
from specdec.execution.packing import PackedLinears
from specdec.execution.recorder import Recordings
from tests.architectures import tiny
from tests.forwards import prefill, verify
from tests.models import tiny_model
from verifiers import RejectionVerifier

LENGTHS = [9, 4, 12, 6]
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
FORK = TreeShape.from_paths([(0,), (1,), (0, 0)])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


def runner_of(model: nn.Module, slots: Sequence[int] = (0, 1), **options: object) -> ModelRunner:
    runner = ModelRunner(model, max_batch_size=6, max_length=40, max_nodes=8, **options)
    tokens = torch.arange(len(slots) * max(LENGTHS)).view(len(slots), -1) % runner.vocab_size
    prefill(runner, tokens, np.zeros(len(slots), dtype=np.int64), slots=slots)
    return runner


def drafted(batch: int) -> DraftTree:
    generator = torch.Generator().manual_seed(2)
    return DraftTree.from_shape(SHAPE, torch.randint(0, 64, (batch, SHAPE.num_nodes + 1), generator=generator))


@pytest.mark.parametrize(
    ("architecture", "hidden_layers", "capture_after"),
    [("llama", (), 1), ("gpt2", (-1, 2), 10**9), ("gemma2", (-1, 2), 1)],
)
def test_only_what_is_wanted_comes_back(architecture, hidden_layers, capture_after, monkeypatch) -> None:
    monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", capture_after)
    runner, tree = runner_of(tiny_model(architecture), [0, 2]), drafted(2)
    wanted = Wants(hidden_layers=(-1, 2), top_k=3), *(Wants(logits=n, hidden_layers=hidden_layers) for n in (2, 0))
    for _ in range(2):
        whole, some, none = (verify(runner, tree, LENGTHS[:2], slots=[0, 2], wants=wants) for wants in wanted)
    assert whole.top_tokens is not None and torch.equal(whole.top_tokens, whole.scores.topk(3).indices)
    assert some.scores.shape[1] == 2 and some.top_tokens is None and none.logits is None
    torch.testing.assert_close(some.scores, whole.scores[:, -2:], **CLOSE)
    for output in (some, none):
        assert set(output.hidden_states) == set(hidden_layers)
        for layer in hidden_layers:
            torch.testing.assert_close(output.hidden_states[layer], whole.hidden_states[layer], **CLOSE)


def test_what_makes_no_forward_and_no_warm_up_is_refused() -> None:
    tree, zero = drafted(1), torch.zeros(1, dtype=torch.long)
    for message, tokens, topology in (
        ("either tokens or embeds", None, tree.topology),
        ("6 nodes per row and its topology 2", tree.tokens, Topology.chain(2, torch.device("cpu"))),
    ):
        with pytest.raises(ValueError, match=message):
            ForwardBatch(tokens=tokens, topology=topology, slots=zero, lengths=zero)
    with Engine(Target(tiny_model()), NGramDrafter(max_draft_tokens=7), RejectionVerifier(), max_length=64) as engine:
        for options, words in (({"nodes": [2, 1000]}, "nodes=1000: "), ({"positions": 65}, "positions=65: ")):
            with pytest.raises(ValueError, match=words):
                engine.warm_up(**options)
        assert not engine.runner.executor.recordings.kept  # type: ignore[attr-defined]
        engine.submit([1, 2], SamplingParams(max_new_tokens=4))
        with pytest.raises(RuntimeError, match="1 requests unfinished: call it before them"):
            engine.warm_up()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)), "t5: encoder-decoder"),
        (lambda: tiny_model().model, "llama: LlamaModel"),
        (tiny_model, "max_length=300"),
        (lambda: tiny("llama", rope_parameters=ROPE), "dynamic RoPE"),
    ],
)
def test_models_that_cannot_run_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelRunner(make(), max_batch_size=1, max_length=300 if "300" in words else 200)


def rounds(runner: ModelRunner, batch: int = 2, hidden_layers: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Logits of several rounds, each with other tokens, behind prefixes that grow."""
    lengths = np.array(LENGTHS[:batch])
    for number in range(4):
        tokens = (torch.arange(4).repeat(batch, 1) * 7 + 5 * number + 1) % runner.vocab_size
        tree = DraftTree.from_shape(FORK, tokens)
        output = verify(runner, tree, lengths, wants=Wants(hidden_layers=hidden_layers))
        yield from (output.scores, *output.hidden_states.values())
        lengths += 1 + number


def test_a_module_of_somebody_else_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        """Keeps a state that a captured forward would not see change."""

        factor = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.factor

    monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", 1)
    model = tiny_model("llama")
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Scaled(old.in_features, old.out_features, bias=False)
    runner = runner_of(model)
    first = list(rounds(runner))
    assert not runner.executor.recordings.kept
    Scaled.factor = 2.0
    assert not torch.equal(first[0], next(rounds(runner)))


CHANGES = {
    "": lambda tokens, states, times: states,
    "value": lambda tokens, states, times: states * 2 if int(tokens.sum()) > 3 else states,
    "array": lambda tokens, states, times: states * float(np.asarray(tokens).sum()),
    "drawn": lambda tokens, states, times: states + torch.rand(states.shape),
    "constant": lambda tokens, states, times: states + torch.tensor(float(next(times))),
}
"""Work of which a part is not an operation on its inputs."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_could_not_be_repeated_is_not_captured(change: str) -> None:
    recorder = _ForwardRecorder(PackedLinears(nn.Identity()), CurrentForward(EagerAttention()), 50)
    recordings, times = Recordings(recorder, after=1, most=9), count()
    tokens = torch.ones(1, 3, dtype=torch.long)

    def stage(tokens: Tensor, positions: Tensor) -> list[Tensor]:
        return [CHANGES[change](tokens, positions.float() + 1, times)]

    for _ in range(2):
        recordings.run("forward", "", stage, [tokens, tokens])
    assert len(recordings.kept) == (change == "")
