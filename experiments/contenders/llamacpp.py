"""llama.cpp on a CPU, in a process of its own, at the target's precision: plain, by prompt lookup, or with a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

from experiments.contenders.peer import Peer, Start, write_float32
from specdec.quantization import quantization_of
from specdec.requests import SamplingParams
from specdec.target.loading import load

_PRECISIONS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""How ggml stores the weights, by dtype or quantization of the target."""


class LlamaCpp(Peer):
    """llama.cpp at batch 1; for a quantized target from the weights that it was made of.

    ``method=draft`` is its server with a small model that drafts (``draft-simple``), through xllamacpp; it says nothing
    of its rounds. All others go through llama-cpp-python. There, below a temperature of 1, filters come before the
    temperature, so top-p and min-p keep other tokens than ours.

    Args:
        draft: The small model that drafts: a folder, a name on the hub, or ``bundled/…``.
        probabilistic: It draws its drafts. Else it takes the most probable tokens.
        name: The target's, of which a quantized one is loaded again.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "llama.cpp", "llama_cpp_worker"
    VARIABLE, PACKAGES = "SPECDEC_LLAMACPP_PYTHON", "llama-cpp-python xllamacpp gguf safetensors"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "draft": 4}

    def __init__(
        self,
        *,
        name: str | None = None,
        inflate: str | Mapping[str, int] | None = None,
        draft: str = "bundled/drafter",
        probabilistic: bool = False,
        **start: Unpack[Start],
    ):
        super().__init__(**start)
        self._name, self._inflate = name, inflate
        self._draft, self._probabilistic = draft, probabilistic
        if self.method == "draft":
            self.WORKER = "llama_server_worker"

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse a repetition penalty, which its workers do not pass on."""
        if sampling.repetition_penalty != 1:
            raise ValueError("llama.cpp is measured without a repetition penalty: leave it out")
        super().check_sampling(sampling)

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the weights in float32, which the worker stores at the target's precision."""
        model, scheme = self.target.model, quantization_of(self.target.model)
        stored = (scheme or str(model.dtype)).removeprefix("torch.")
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
        write_float32(model, folder)
        given: dict[str, Any] = {"precision": _PRECISIONS[stored]}
        if self.method == "draft":
            write_float32(load(self._draft, dtype="float32", device="cpu").model, folder / "draft")
            given |= {"draft": str(folder / "draft"), "probabilistic": self._probabilistic}
        return given
