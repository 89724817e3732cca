"""A small causal LM that drafts a chain or a tree.

Leviathan et al. 2023 (arXiv 2211.17192) for chains, SpecInfer (arXiv 2305.09781) for trees; with noise that the target
shares, Daliri et al. 2024 (arXiv 2408.07978).
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafters.own_model import OwnModelDrafter
from specdec.cache.formats import check_format
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.model_scorer import ModelScorer
from specdec.drafting.scored import ScoredSession, law_of
from specdec.drafting.vocabulary import VocabularyMap, check_same_vocabulary
from specdec.interfaces import Sizes
from specdec.placement import main_device
from specdec.quantization.stored import output_width
from specdec.target.loading import load_model, load_tokenizer
from specdec.target.support import check_model, check_tokenizer
from specdec.target.target import Target
from specdec.types import DraftSampling


class ModelDrafter(OwnModelDrafter):
    """Drafts with a model of the target's vocabulary, level by level down a tree.

    Each level takes one forward over all rows and all nodes that are to have children. The model has its own KV cache,
    which follows the accepted path like the target's.

    Args:
        model: The drafting model, on the target's device. Logits wider or narrower than the target's (padded
            vocabularies) are cut or filled up with zero probability.
        shape: What ``TreeShape.of`` takes (a chain's length, branching factors, or paths), or a tree builder.
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` (the top k) or ``"coupled"`` (the first k with the target's noise, for
            ``SharedNoiseVerifier``). Greedy requests always get the top k.
        temperature: The drafter's own; None follows each request. 0 means ``"deterministic"``.
        tokenizer: The model's tokenizer, to check its vocabulary against the target's.
        name: Shown in error messages.
        attention: See ``ModelRunner``; for this model's forwards.
        optimize: See ``ModelRunner``; for this model's forwards.
        kv_cache: See ``ModelRunner``; for this model's keys and values. It may differ from the target's.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: AnyTree = 4,
        *,
        sampling: DraftSampling | str = DraftSampling.IID,
        temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
    ):
        check_model("model", model, "ModelDrafter.from_pretrained")
        check_tokenizer(tokenizer)
        name = name or model.config.model_type
        super().__init__(
            tree_of(shape),
            law_of(sampling),
            temperature,
            name=name,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        shape: AnyTree = 4,
        sampling: DraftSampling | str = DraftSampling.IID,
        temperature: float | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        device_map: str | Mapping[str, Any] | None = None,
        max_memory: Mapping[Any, Any] | None = None,
        quantization: str | None = None,
        quantization_check: bool = True,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
    ) -> "ModelDrafter":
        """Load the model and its tokenizer; arguments as for ``Target.from_pretrained`` and the class."""
        options: dict[str, Any] = {
            "device_map": device_map,
            "max_memory": max_memory,
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "trust_remote_code": trust_remote_code,
        }
        options = {name: value for name, value in options.items() if value not in (None, False)}
        check_format(kv_cache)  # before the model is loaded
        model = load_model(
            name_or_path,
            dtype=dtype,
            device=device,
            quantization=quantization,
            quantization_check=quantization_check,
            **options,
        )
        try:
            tokenizer = load_tokenizer(name_or_path, **options)
        except ValueError:
            tokenizer = None  # many drafters ship without one; then only the widths can be compared
        return cls(
            model,
            shape,
            sampling=sampling,
            temperature=temperature,
            tokenizer=tokenizer,
            name=name_or_path,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check vocabulary and device, and allocate the cache."""
        output = self.model.get_output_embeddings()
        if output is not None:  # without one, the runner says so
            check_same_vocabulary(self.name, self.tokenizer, output_width(output), target)
        device = main_device(self.model)
        if device != target.device:
            raise ValueError(f"the drafter is on {device} and the target on {target.device}: load both on one device")
        runner = self.runner_for(self.model, "drafter", sizes, max_nodes=self.tree.max_shown)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size)
        scorer = ModelScorer(runner, max_batch_size=sizes.max_batch_size, to_model=vocabulary.to_drafter)
        return ScoredSession(self, scorer, vocabulary, target.device, sizes)
