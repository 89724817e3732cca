"""Machines that are not here, models that are inflated, and the line that an error is said to come from."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import TreeShape, machine
from specdec.doctor import table
from specdec.inflate import describe, inflate, place_heads, resolve_shape
from specdec.llama_shapes import SHAPES, LlamaShape
from specdec.machine import Cpu
from specdec.origin import described, own_place, place
from tests.models import tiny_model

LAPTOP = Cpu(features=frozenset({"avx2", "fma", "f16c"}), physical_cores=4, logical_cores=8)
ZEN4 = Cpu(features=LAPTOP.features | {"avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"})
SAPPHIRE_RAPIDS = Cpu(features=ZEN4.features | {"amx_bf16", "amx_tile", "avx512_fp16"})
GRAVITON3 = Cpu(features=frozenset({"asimd", "fphp", "asimdhp", "sve", "svebf16", "bf16"}))
UNKNOWN = Cpu()


def test_native_arithmetic_and_cores_that_a_process_may_use() -> None:
    for facts, bfloat16, float16 in (
        (LAPTOP, False, False),
        (ZEN4, True, False),
        (SAPPHIRE_RAPIDS, True, True),
        (GRAVITON3, True, True),
        (UNKNOWN, False, False),
        (replace(SAPPHIRE_RAPIDS, onednn=False), False, False),
        (replace(SAPPHIRE_RAPIDS, onednn_limit="AVX512_CORE_BF16"), True, False),
    ):
        native = [machine.is_native(dtype, torch.device("cpu"), facts) for dtype in (torch.bfloat16, torch.float16)]
        assert native == [bfloat16, float16], facts
        assert all(machine.is_native(dtype, torch.device("cpu"), facts) for dtype in (torch.float32, torch.float64))
    for cores, quota, usable in ((4, None, 4), (32, 3.5, 3), (2, 16.0, 2), (8, 0.5, 1)):
        assert machine.usable_cores(Cpu(physical_cores=cores, quota=quota)) == usable
    assert machine.usable_cores(UNKNOWN) == 1


def quota(root: Path, own: str, **limits: str) -> float | None:
    """The quota with files of a control group file system: ``a__b__cpu.max`` stands for a/b/cpu.max."""
    for name, text in limits.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "own").write_text(own)
    return machine.cgroup_quota(root, root / "own")


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    two, one = tmp_path / "2", tmp_path / "1"
    limits = {"pod__job__cpu.max": "max 100000\n", "pod__cpu.max": "250000 100000\n"}
    assert quota(two, "0::/pod/job\n", **limits) == 2.5
    assert quota(two, "0::/pod/job\n", **{"pod__job__cpu.max": "100000 200000\n"}) == 0.5
    assert quota(two, "0::/other\n") is None
    own, folder = "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n", "cpu,cpuacct__job__"
    limits = {f"{folder}cpu.cfs_quota_us": "300000\n", f"{folder}cpu.cfs_period_us": "100000\n"}
    assert quota(one, own, **limits) == 3.0
    assert quota(one, own, **{f"{folder}cpu.cfs_quota_us": "-1\n"}) is None


def test_this_machine_is_read_without_fail() -> None:
    facts = machine.cpu()
    assert 1 <= facts.physical_cores <= facts.logical_cores and facts.name and facts.features and machine.cpu() is facts
    assert table(facts)["processor"] == facts.name and machine.usable_cores() >= 1
    assert not torch.cpu._is_avx512_bf16_supported() or "avx512_bf16" in facts.features, "as another source says"


def sized(*sizes: int) -> LlamaShape:
    return LlamaShape(**dict(zip(LlamaShape.__annotations__, sizes, strict=True)))


SMALL = vars(sized(32, 2, 4, 2, 8, 40)) | {
    "vocab_size": 48, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LARGER = sized(96, 4, 12, 6, 8, 112)


def small(*, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A Llama whose every weight matters: norms that are not 1, attention that looks around, biases that are not 0."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | changes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
        else:
            parameter.data.mul_(10.0 if "embed" in name else 6.0)
    return model


@torch.inference_mode()
def outputs(model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    found = model(tokens, output_hidden_states=True)
    return found.logits, found.hidden_states[-1]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SOURCES: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large epsilon": {"rms_norm_eps": 0.5},
    "multi-query": {"num_key_value_heads": 1},
    "llama3 rope": {"rope_parameters": LLAMA3},
}
GOALS = {
    "larger": LARGER,
    "wider groups": replace(LARGER, num_attention_heads=24, num_key_value_heads=4),
    "four times as wide heads": replace(LARGER, head_dim=32, num_key_value_heads=12),
    "the same but for layers": sized(32, 3, 4, 4, 8, 40),
}


@pytest.mark.parametrize(
    ("source", "goal"), [*(("untied", goal) for goal in GOALS), *((source, "larger") for source in list(SOURCES)[1:])]
)
def test_same_logits(source: str, goal: str) -> None:
    model = small(**SOURCES[source])
    before = copy.deepcopy(model.state_dict())
    larger = inflate(model, GOALS[goal])
    assert vars(GOALS[goal]).items() <= larger.config.to_dict().items()
    assert larger.lm_head.weight.shape == (48, GOALS[goal].hidden_size)
    assert (larger.lm_head.weight is larger.model.embed_tokens.weight) == (source == "tied")
    logits, hidden = outputs(model)
    wide_logits, wide_hidden = outputs(larger)
    # Logits are of the order of 10; the sums only have other groupings.
    torch.testing.assert_close(wide_logits, logits, atol=2e-4, rtol=2e-5)
    torch.testing.assert_close(wide_hidden[..., :32], hidden, atol=2e-5, rtol=2e-5)
    assert not wide_hidden[..., 32:].any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the given model was changed"


def test_named_shapes_are_llama_shapes_and_what_does_not_fit_is_refused() -> None:
    for name in SHAPES:
        goal = resolve_shape(name)
        assert resolve_shape(LlamaConfig(**vars(goal))) == goal == resolve_shape(vars(goal))
        assert place_heads(4, 2, goal.num_attention_heads, goal.num_key_value_heads) is not None
        assert describe(name) == name
    with pytest.raises(ValueError, match="qwen2"):
        inflate(tiny_model("qwen2"), LARGER)
    for goal, words in (
        ({"hidden_size": 64}, "exactly the numbers hidden_size, "),
        (replace(LARGER, hidden_size=24), "hidden_size is 32, .* 24"),
        (replace(LARGER, head_dim=12), "in multiples of it, not in 12"),
        (replace(LARGER, num_key_value_heads=1), "give the shape more key-value heads"),
    ):
        with pytest.raises(ValueError, match=words):
            inflate(small(), goal)
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32}
    model = small(rope_parameters=rope)
    with pytest.raises(ValueError, match="yarn RoPE depends on the head's width"):
        inflate(model, replace(LARGER, head_dim=16))
    torch.testing.assert_close(outputs(inflate(model, LARGER))[0], outputs(model)[0], atol=2e-4, rtol=2e-5)


def raised(function) -> Exception:
    """The error of a call, as if this file had not made it."""
    try:
        function()
    except Exception as error:
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


def reads() -> object:
    return json.loads("{oops")  # Python's own code raises


def shapes() -> object:
    return TreeShape.chain(0)  # the framework raises


def test_an_error_is_told_from_the_deepest_line_of_the_users_own_code(tmp_path: Path, monkeypatch) -> None:
    for function in (reads, shapes):
        found, line = own_place(raised(function)), function.__code__.co_firstlineno + 1
        assert (Path(found.file), found.line, found.function) == (Path(__file__), line, function.__name__)
    error = raised(shapes)
    bare = error.with_traceback(error.__traceback__.tb_next)  # as if the framework had been called by itself
    assert own_place(bare) is None
    found = place(bare)
    assert found.file.endswith("specdec/arguments.py") and found.function == "whole"
    error, outer = raised(reads), ValueError("in other words")
    outer.__cause__ = error
    assert own_place(outer).function == "reads"
    assert described(error).startswith("JSONDecodeError: Expecting property name")
    assert described(error).endswith(" in reads)") and "\n" not in described(error)
    assert described(RuntimeError("a\nb")) == "RuntimeError: a", "never raised, so it has no line"
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ndef f(:\n", str(tmp_path / "own.py"), "exec")
    monkeypatch.chdir(tmp_path)
    assert str(own_place(caught.value.with_traceback(None))) == "own.py:2", "a file that Python cannot read"
