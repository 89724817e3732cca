"""Models over several devices, disks or processes decode the same tokens. As a module: what every process runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

from drafters import MedusaDrafter, ModelDrafter, NGramDrafter
from specdec import Drafter, Engine, ModelRunner, SamplingParams, Target
from specdec.attention import BACKENDS
from specdec.cache.layout import LayerShape
from specdec.cache.storage import Cache
from specdec.engine import round as round_module
from specdec.placement import main_device
from specdec.quantization import quantize
from specdec.quantization.base import weights_read
from specdec.target import parallel
from specdec.target.invariance import settle
from specdec.target.loading import load
from tests.components import medusa_heads
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier

PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]
CASES = [("plain", 0.0), ("ngram", 0.0), ("model", 0.0), ("model", 0.9), ("medusa", 0.9)]
ON_DISK = {
    **{f"model.{part}": "disk" for part in ("embed_tokens", "layers.0", "layers.2", "norm")},
    **{f"model.{part}": "cpu" for part in ("rotary_emb", "layers.1", "layers.3")},
    "lm_head": "cpu",
}
DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "ngram": lambda model: NGramDrafter(4, branches=2),
    "model": lambda model: ModelDrafter(model, (2, 2)),
    "medusa": lambda model: MedusaDrafter(medusa_heads(tiny_model()), (2, 1)),
}

FAR = torch.device("meta")
"""What the tensors say that they are on. torch can index tensors of this kind of device on every machine."""
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _run(owner: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The result of an operation, on the device where all of its tensors are."""
    kwargs = kwargs or {}
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.ndim]
    if len({isinstance(each, FarTensor) for each in tensors}) > 1 and function not in _MOVES:
        raise RuntimeError(f"{function} mixes tensors of two devices")
    goal = kwargs.get("device")
    far = isinstance(tensors[0], FarTensor) if goal is None and tensors else goal is not None and goal == FAR
    if goal is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    # Tensors made in inference mode would refuse to be viewed through a wrapper.
    with torch.inference_mode(torch.is_inference_mode_enabled() and not far), torch.no_grad():
        args_here, kwargs_here = tree_map(lambda each: getattr(each, "near", each), (args, kwargs))
        result = function(*args_here, **kwargs_here)
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map(lambda each: FarTensor(each) if isinstance(each, Tensor) else each, result) if far else result


class FarTensor(Tensor):
    """A tensor on the far device; its numbers lie on the CPU."""

    near: Tensor
    __torch_dispatch__ = classmethod(_run)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> "FarTensor":
        return Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )

    def __init__(self, near: Tensor):
        self.near = near


class FarDevice(TorchDispatchMode):
    """While it is entered, tensors can be made on the far device, and moved there and back."""

    __torch_dispatch__ = _run


@pytest.fixture
def on_disk(tmp_path: Path) -> PreTrainedModel:
    tiny_model(seed=7, scale=4.0).save_pretrained(tmp_path)
    return load(str(tmp_path), device_map=ON_DISK, offload_folder=f"{tmp_path}/offloaded").model


def outputs(model: Any, name: str, temperature: float, *, agree: bool = True, **options: Any) -> list[list[int]]:
    drafter = None if name == "plain" else DRAFTERS[name](model)
    with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64, **options) as engine:
        if not agree:
            engine.runner.agreement = parallel.Agreement()
        sampling = SamplingParams(max_new_tokens=6, temperature=temperature, seed=5)
        return [list(done.token_ids) for done in engine.generate(PROMPTS, sampling)]


def test_layers_on_disk_and_offloaded_ones_decode_the_same(on_disk: PreTrainedModel) -> None:
    model, whole = on_disk, tiny_model(seed=7, scale=4.0)
    assert next(model.parameters()).device.type == "meta" and main_device(model) == torch.device("cpu")
    for temperature in (0.0, 0.9):
        assert outputs(model, "medusa", temperature) == outputs(whole, "medusa", temperature)
    model = cpu_offload(tiny_model(seed=7, scale=4.0), execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta" and main_device(model) == torch.device("cpu")
    assert outputs(model, "ngram", 0.0) == outputs(whole, "ngram", 0.0)


@pytest.mark.full
def test_layers_on_disk_are_not_recorded_and_keep_the_promise_of_invariant_mode(on_disk, monkeypatch) -> None:
    """A recording would keep the weights that hooks have brought into memory for one forward."""
    monkeypatch.setattr("specdec.engine.recording.RECORD_AFTER", 2)
    model, whole = on_disk, tiny_model(seed=7, scale=4.0)
    engine = Engine(Target(whole), ModelDrafter(model, (2, 2)), RejectionVerifier(), max_length=64, recording="rounds")
    sampling = SamplingParams(max_new_tokens=20)
    found, plain = (engine.generate(PROMPTS, sampling, speculate=each) for each in (True, False))
    recordings = engine._rounds.recorder.recordings
    assert recordings is not None and recordings.replays > 0
    assert {key[0] for key in recordings.kept} == {"verify", "judge", "commit"}
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert outputs(model, "ngram", 0.0, invariant=True) == outputs(whole, "plain", 0.0, invariant=True)


def far_half() -> PreTrainedModel:
    """A model whose later layers are on another device. Hooks move what they get, as accelerate's do."""
    model: Any = tiny_model(seed=7, scale=4.0)

    def move(device: torch.device) -> Callable[..., Any]:
        def moved(module: nn.Module, *given: Any) -> Any:
            return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, given)

        return moved

    for part in (*model.model.layers[2:], model.model.norm):
        for module in part.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(FarTensor(parameter.detach()), requires_grad=False))
        part.register_forward_pre_hook(move(FAR), with_kwargs=True)
    model.lm_head.register_forward_pre_hook(move(torch.device("cpu")), with_kwargs=True)
    model._hf_hook, model.hf_device_map = object(), {"": "cpu"}
    return model


@pytest.mark.parametrize("drafter", ["medusa", pytest.param("model", marks=pytest.mark.full)])
def test_keys_and_values_stay_where_their_layer_runs(drafter: str) -> None:
    """No operation may mix tensors of the two devices, and the tokens are those of a model on one device."""
    model = far_half()
    with FarDevice():
        found = outputs(model, drafter, 0.9)
        runner = Engine(Target(model), max_length=32).runner
    assert [runner.facts.layers[layer].device for layer in range(4)] == [None, None, FAR, FAR]
    assert {tensor.device for tensor in runner.cache.tensors} == {torch.device("cpu"), FAR}
    whole = tiny_model(seed=7, scale=4.0)
    assert found == outputs(whole, drafter, 0.9)


def test_several_devices_are_refused_by_kernels_and_invariant_mode_and_asked_for_memory(monkeypatch) -> None:
    runner: Any = ModelRunner(tiny_model(), max_batch_size=1, max_length=64, invariant=True)
    spread: Any = runner.model  # says that its layers run on two GPUs; it runs on neither
    spread._hf_hook, spread.hf_device_map = object(), {"model.layers.0": "cpu", "model.layers.1": 0, "lm_head": 1}
    with pytest.raises(ValueError, match=r"invariant=True: .*several devices"):
        settle(runner.executor)
    monkeypatch.setattr("specdec.attention.triton.obstacle", lambda device: None)
    assert "several devices" in str(BACKENDS["triton"].check(spread))
    free = {torch.device("cpu"): 10**6, FAR: 1000}
    monkeypatch.setattr("specdec.cache.layout.free_memory", free.__getitem__)
    shapes = {layer: LayerShape(2, 8, 2, 8, torch.float32, device) for layer, device in enumerate((None, FAR))}
    with pytest.raises(ValueError, match=r"10 positions x 128 bytes\), but meta has"):
        Cache(shapes, max_batch_size=4, max_length=8, max_nodes=2, device=torch.device("cpu"))


def every(model: Any, cases: list[tuple[str, float]]) -> dict[str, list[list[int]]]:
    return {f"{name} at {temperature}": outputs(model, name, temperature) for name, temperature in cases}


def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    def deciding(*args: Any) -> Any:
        verdict = right(*args)
        return replace(verdict, next_token=(verdict.next_token + 1) % 64)

    return deciding


def one_process(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    DRAFTERS["model"] = lambda model: ModelDrafter(tiny_model(seed=3), (2, 2))
    found: dict[str, Any] = {"alone": every(load(str(folder), dtype="float32").model, CASES)} if rank == 0 else {}
    shared = load(str(folder), dtype="float32", tensor_parallel=True).model
    engine = Engine(Target(shared), max_length=32, recording="rounds")
    assert type(engine.runner.executor).__name__ == "Executor" and engine._rounds.recorder.recordings is None
    assert engine.runner.facts.layers[0].key_heads == tiny_model().config.num_key_value_heads // 2, "its own"
    assert engine.runner.weights_read().bytes < 0.6 * weights_read(tiny_model()).bytes
    found["together"] = every(shared, CASES)
    found["in int8"] = [outputs(shared, name, 0.0, kv_cache="int8") for name in ("plain", "ngram")]
    with pytest.raises(ValueError, match="invariant=True"):
        Engine(Target(shared), max_length=32, invariant=True)
    if rank == 1:  # from here on, the processes are of different opinions
        DRAFTERS["model"] = lambda model: ModelDrafter(tiny_model(seed=4), (2, 2))
        DRAFTERS["ngram"] = lambda model: NGramDrafter(4, branches=2, max_ngram=1)
        for name in ("accept", "certain"):  # rounds with a rule, and plain greedy ones
            setattr(round_module, name, wrong(getattr(round_module, name)))
    found["despite other opinions"] = every(shared, [CASES[0], CASES[1], CASES[3]])
    found["without agreement"] = outputs(shared, "plain", 0.0, agree=False)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # gloo's threads outlive their group, and the interpreter aborts if it ends while one of them lets go of a tensor
    # (pytorch#190489). All is written.
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.full
def test_two_processes_decode_what_one_does(tmp_path: Path) -> None:
    tiny_model(seed=7, scale=4.0).save_pretrained(tmp_path)
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.specdec.test_device_map", str(tmp_path)]
    options = {"cwd": Path(__file__).parents[2], "env": own | {"OMP_NUM_THREADS": "1"}, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert len(first["together"]) == 5 and first["together"] == second["together"] == first["alone"]
    # Rounding to bytes may fall otherwise than in one process, so it is compared with plain decoding in both.
    plain, drafted = first["in int8"]
    assert plain == drafted and second["in int8"] == [plain, drafted]
    # The second process has other drafts, and each of its own verdicts is wrong: what the first one decides counts.
    assert first["despite other opinions"] == second["despite other opinions"]
    assert first["despite other opinions"].items() <= first["alone"].items()
    # Without agreement even the first one is wrong: its forwards mix its tokens with those of the other.
    alone = first["alone"]["plain at 0.0"]
    assert alone != first["without agreement"] != second["without agreement"] != alone


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_model, {"device_map": "cpu"}, "device_map='cpu'"),
        (tiny_model, {"device_map": {"": 7}}, "device_map.''.=7"),
        (tiny_model, {"device_map": "auto", "quantization": "int8"}, "quantization='int8'"),
        (tiny_model, {"tensor_parallel": 2}, "processes is 3; .*torchrun"),
        (tiny_model, {"tensor_parallel": 3, "device_map": "auto"}, "device_map='auto' and tensor_parallel=3"),
        (tiny_model, {"tensor_parallel": 3}, "tensor_parallel=3 .*4 attention heads"),
        (lambda: tiny_model("gpt2"), {"tensor_parallel": 3}, "no plan for splitting gpt2"),
        (lambda: quantize(tiny_model(), "int8"), {"tensor_parallel": 3}, "quantized by this project"),
    ],
)
def test_what_cannot_be_divided(make: Any, tmp_path: Path, monkeypatch, options: dict[str, Any], message: str) -> None:
    """As if torchrun had started three processes."""
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    make().save_pretrained(tmp_path)
    with shapes_unchecked(), pytest.raises(ValueError, match=message):
        load(str(tmp_path), **options)


if __name__ == "__main__":
    one_process(Path(sys.argv[1]))
