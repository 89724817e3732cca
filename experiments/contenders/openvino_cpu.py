"""OpenVINO GenAI on a CPU, in a process of its own: plain, by prompt lookup, or with a small model that drafts."""

from pathlib import Path
from typing import Any, ClassVar, Unpack

from experiments.contenders.peer import Peer, Start, write_float32
from specdec.quantization import quantization_of
from specdec.target.loading import load

_PRECISIONS = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
"""OpenVINO's name of the target's dtype."""


class OpenVinoCpu(Peer):
    """OpenVINO GenAI's ``ContinuousBatchingPipeline``, which drafts one chain per prompt.

    Its prompt lookup fills rounds with impossible tokens, so every forward has ``num_tokens + 1`` rows. Its EAGLE-3
    takes heads without norms before their first product only, which the bundled one has: it is not measured.

    Args:
        draft: The small model that drafts: a folder, a name on the hub, or ``bundled/…``.
        patched: Keep those drafts that the target's own draws are, as its prompt lookup does; the rule of 2026.4
            behind a model draws wrongly.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "OpenVINO GenAI", "openvino_worker"
    VARIABLE, PACKAGES = "SPECDEC_OPENVINO_PYTHON", "'openvino-genai==2026.4.*' safetensors"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "model": 4}

    def __init__(self, *, draft: str = "bundled/drafter", patched: bool = False, **start: Unpack[Start]):
        super().__init__(**start)
        self._draft, self._patched = draft, patched

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the models in float32, which the worker stores at the target's precision."""
        scheme, dtype = quantization_of(self.target.model), str(self.target.dtype).removeprefix("torch.")
        if scheme is not None or dtype not in _PRECISIONS:
            raise ValueError(
                f"OpenVINO GenAI is measured in {', '.join(_PRECISIONS)}, and the target is in {scheme or dtype}: "
                "leave this contender out"
            )
        self.tells_tokens = dtype == "float32"
        write_float32(self.target.model, folder)
        draft = None
        if self.method == "model":
            draft = folder / "draft"
            write_float32(load(self._draft, dtype="float32", device="cpu").model, draft)
        # The length of n-grams. Beside a draft model it changes nothing but the rule.
        ngram = {"plain": 0, "ngram": 4, "model": int(self._patched)}[self.method]
        return {"precision": _PRECISIONS[dtype], "draft": draft and str(draft), "ngram": ngram}
