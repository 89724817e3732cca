"""What invariant mode promises: it is tried on the model, and what cannot keep it is refused or runs another way."""

import logging

import pytest
import torch
from torch import Tensor, nn

from specdec.execution.invariant import ROWS
from specdec.target import invariance
from tests.architectures import tiny
from tests.specdec.invariant_forwards import (
    PATH,
    chain,
    executor_of,
    model_in,
    one_by_one,
    runner_for,
    same,
    tokens,
    trees,
)


class Beside(nn.Module):
    """A layer whose output for a row depends a little on the rows beside it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1e-3 * inputs.mean(0, keepdim=True)


class Counting(nn.Module):
    """A layer that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs * (1 + 1e-5 * self.calls)


def test_a_model_that_cannot_promise_it_is_refused_by_the_part() -> None:
    model = model_in(torch.float32)
    model.model.layers[2].mlp.act_fn = nn.Sequential(model.model.layers[2].mlp.act_fn, Counting())
    with pytest.raises(ValueError, match=r"model.layers.2.mlp.act_fn.1"):
        runner_for(model)


@pytest.mark.full
def test_experts_run_alone() -> None:
    runner = runner_for(tiny("mixtral").bfloat16())
    assert executor_of(runner).rows == 1
    given = tokens(20)
    assert same(chain(runner, given, slot=1), one_by_one(runner, given))


@pytest.mark.full
def test_attention_sinks() -> None:
    runner = runner_for(tiny("gpt_oss").bfloat16())
    given = tokens(20)
    plain = one_by_one(runner, given)
    assert same(trees(runner, given, [9], [1])[0, PATH], plain[9:14])


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gptj", "attention function"),
        ("deepseek_v32", "indexer"),
        ("deepseek_v3", "changes keys or values"),
        ("doge", "changes the mask"),
    ],
)
def test_models_that_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"invariant=True: .*{reason}"):
        runner_for(tiny(model_type))


def test_rows_that_touch_each_other_run_alone_from_the_change_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, given = model_in(torch.float32), tokens()
    runner = runner_for(model)
    assert executor_of(runner).rows == ROWS
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, Beside())
    with caplog.at_level(logging.INFO):
        runner.weights_changed()
        assert same(chain(runner, given, slot=1), one_by_one(runner, given))
    assert executor_of(runner).rows == 1
    assert "model.layers.1.mlp.act_fn.1" in caplog.text


# Elementwise functions: which sizes are computed by one code throughout.


@pytest.mark.full
def test_a_function_that_ends_within_a_vector_is_not_put_into_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A layer of width 45: the last of 16 x 45 numbers are computed by other code, whose silu rounds otherwise."""
    torch.manual_seed(0)
    model = model_in(torch.float32)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            projection = getattr(layer.mlp, name)
            projection.weight = nn.Parameter(projection.weight[:45].clone())
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight[:, :45].clone())
    with caplog.at_level(logging.INFO):
        runner = runner_for(model)
    assert executor_of(runner).rows == 1
    assert "an elementwise function of 720 numbers does not end with a whole vector" in caplog.text


def test_fewer_threads_where_theirs_would_end_within_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads at which the promise was tried stays, whatever torch is told later."""
    monkeypatch.setattr(invariance, "_GRAIN", 300)  # so that the tiny model's 768 numbers are divided into three
    torch.set_num_threads(3)
    runner = runner_for(model_in(torch.float32))
    assert executor_of(runner).threads == 2, "three parts of 256 are whole vectors, but those of 1,024 numbers are not"
    seen: list[int] = []
    runner.model.lm_head.register_forward_hook(lambda *call: seen.append(torch.get_num_threads()))
    chain(runner, tokens(3))
    assert (set(seen), torch.get_num_threads()) == ({2}, 3)
