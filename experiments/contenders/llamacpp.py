"""llama.cpp on a CPU, in a process of its own, at the target's precision: plain, or by prompt lookup."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

from experiments.contenders.peer import Peer, Start
from specdec.quantization import quantization_of
from specdec.target.loading import load

_PRECISIONS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""How ggml stores the weights, by dtype or quantization of the target."""


class LlamaCpp(Peer):
    """llama.cpp through llama-cpp-python, at batch 1; for a quantized target from the weights that it was made of.

    Below a temperature of 1 its filters come before the temperature, so top-p and min-p keep other tokens than ours.

    Args:
        name: The target's, of which a quantized one is loaded again.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "llama.cpp", "llama_cpp_worker"
    VARIABLE, PACKAGES = "SPECDEC_LLAMACPP_PYTHON", "llama-cpp-python gguf safetensors"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8}

    def __init__(
        self, *, name: str | None = None, inflate: str | Mapping[str, int] | None = None, **start: Unpack[Start]
    ):
        super().__init__(**start)
        self._name, self._inflate = name, inflate

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the weights in float32, which the worker stores at the target's precision."""
        model, scheme = self.target.model, quantization_of(self.target.model)
        stored = (scheme or str(model.dtype)).removeprefix("torch.").removesuffix("_compact")
        if self.max_batch_size > 1 or stored not in _PRECISIONS:
            raise ValueError(
                f"llama.cpp is measured at batch 1 and in {', '.join(_PRECISIONS)}, and this run has "
                f"engine.max_batch_size={self.max_batch_size} and a target in {stored}: leave this contender out"
            )
        self.tells_tokens = stored == "float32"
        if scheme is not None:
            if self._name is None:
                raise ValueError(f"llama.cpp needs the weights that {self.target.name} was made of: give name=FOLDER")
            model = load(self._name, dtype="float32", device="cpu", inflate=self._inflate).model
        model.save_pretrained(folder, state_dict={name: each.float() for name, each in model.state_dict().items()})
        return {"precision": _PRECISIONS[stored]}
