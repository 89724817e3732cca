"""Kernels of a plain step of a Llama, layer by layer and stage by stage, on a GPU that is not there.

    python -m tests.gpu.dry.count llama-8b batch=1 temperature=0

prints how often every operation is launched in a layer, and what a step launches besides its layers. An operation of
torch is counted as one kernel, which a few (sorts, softmax of long rows) exceed.
"""

import sys
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from experiments.bench.gpu import llama_config
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.gpu.dry.fake_cuda import fake_cuda, move

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_weight_int4pack_mm")
"""Operations that multiply by weights."""


@dataclass
class Kernels:
    """Launches of one plain step, whose stages are replayed as graphs.

    Attributes:
        layer: Those of one layer of the model, by operation.
        stages: Those of each stage besides the layers.
    """

    layer: Counter[str]
    stages: dict[str, Counter[str]]

    @property
    def between(self) -> int:
        """The kernels of a layer that are neither products nor attention."""
        return sum(
            count
            for name, count in self.layer.items()
            if name not in PRODUCTS and not name.startswith(("triton attend", "triton merge"))
        )


def kernels(shape: str = "llama-8b", *, batch: int = 1, temperature: float = 0.0) -> Kernels:
    """Return the kernels of a step of a Llama by the name of its shape (``experiments.bench.gpu``)."""
    few, more = (_step(shape, layers, batch, temperature) for layers in (1, 2))
    layer = more["verify"] - few["verify"]
    return Kernels(layer, few | {"verify": few["verify"] - layer})


def llama(shape: str, layers: int, **sizes: int) -> PreTrainedModel:
    """Return a model without numbers in bfloat16 (``fake_cuda.move``)."""
    config = llama_config(shape, num_hidden_layers=layers, **sizes)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def _step(shape: str, layers: int, batch: int, temperature: float) -> dict[str, Counter[str]]:
    model = llama(shape, layers)
    move(model)
    with fake_cuda() as device:
        engine = Engine(Target(model), max_batch_size=batch, max_length=512)
        for _ in range(batch):
            engine.submit([1, 2, 3], SamplingParams(max_new_tokens=100, temperature=temperature))
        while not device.captured:
            engine.step()
        return {stage: counts for stage, counts in device.kernels.items() if stage}


def main() -> None:
    """Print the table."""
    shape, *words = sys.argv[1:] or ["llama-8b"]
    given = dict(word.split("=") for word in words)
    found = kernels(shape, batch=int(given.get("batch", 1)), temperature=float(given.get("temperature", 0)))
    print(f"{shape}, {found.layer.total()} kernels a layer, {found.between} of them between products and attention:")
    for name, count in found.layer.most_common():
        print(f"  {count:3d} {name}")
    for stage, counts in found.stages.items():
        print(
            f"{stage}, besides the layers: {counts.total()}: {', '.join(f'{n} {c}' for c, n in counts.most_common())}"
        )


if __name__ == "__main__":
    main()
