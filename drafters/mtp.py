"""Drafts with the modules for multi-token prediction that many models ship with (DeepSeek-V3, arXiv 2412.19437)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.heads.base import FeatureHead
from drafters.heads.files import Public, check_layout
from drafters.heads.mtp import HIDDEN, TOKENS, MTPHead, holds_module, load_mtp, model_like, save_mtp
from drafters.heads.unrolled import TrainedFeatureHead
from drafters.own_model import FeatureDrafter, HeadOptions, Loaded
from specdec import Drafter, Target
from specdec.arguments import instance, whole
from specdec.drafting.builders import AnyTree, tree_of

Load = Callable[[PreTrainedModel], MTPHead]


class MTPDrafter(FeatureDrafter):
    """Drafts with one module (or what loads it), which reads its own output for the second token and those after it."""

    usual: ClassVar = {"family": "mtp"}
    public = (
        Public(
            name="mtp",
            title="an MTP module",
            formats=("native", "speculators"),
            holds=holds_module,
            read=lambda path, target, *, dtype: load_mtp(path, target=model_like(path, target), dtype=dtype),
            write=save_mtp,
            tokens=lambda module: TOKENS,
            width="captured_width",
            decides=("before_norm", "model.hidden_first"),
            remark=lambda module, layout: (
                "engines read MTP modules from the target's own folder; vLLM takes this one for Qwen3-Next only"
            ),
        ),
    )

    def __init__(self, head: MTPHead | Load, shape: AnyTree = 3, **options: Unpack[HeadOptions]):
        self._load: Load | None = None if isinstance(head, nn.Module) or not callable(head) else head
        if self._load is None:
            instance("head", head, MTPHead, "a module, or load one with MTPDrafter.from_pretrained(…)")
        super().__init__(
            head if isinstance(head, MTPHead) else None, tree_of(shape), **{"name": "MTP module", **options}
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        *,
        shape: AnyTree = 3,
        module: int = 0,
        hidden_state: str = "auto",
        **options: Unpack[Loaded],
    ) -> "MTPDrafter":
        """Take the module from files (None: the target's) in ``bind``; a wrong ``hidden_state`` costs acceptance."""
        given = {"module": whole("module", module, least=0), "hidden_state": hidden_state}
        check_layout(hidden_state, HIDDEN, "hidden_state")

        def load(path: str | Path | None, **where: Any) -> Load:
            def read(target: PreTrainedModel) -> MTPHead:
                place = path or target.config.name_or_path
                if not place:
                    raise ValueError(
                        "the target was not loaded from files, so its MTP module cannot be found: give the folder that "
                        "it is in"
                    )
                return load_mtp(place, target=target, **given, **where)

            return read

        return cls.loaded(path, load, shape, options)

    def head_for(self, target: Target) -> FeatureHead:
        """Return the module that was given, or else read it from its files."""
        return self.head if self._load is None else self._load(target.model)


class TrainedMTP(TrainedFeatureHead):
    """A module, new or trained further (FastMTP, arXiv 2509.18362); ``name`` may be the target's (``module``)."""

    title = "MTP module"

    def __init__(self, *, name: str | None = None, module: int = 0, depths: int = 3, hidden_state: str = "auto"):
        super().__init__(depths)
        check_layout(hidden_state, HIDDEN, "head.hidden_state")
        self.name, self.module, self.hidden_state = name, module, hidden_state
        self._fusion: tuple[nn.Module, ...] = ()

    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        if self.name is not None:
            head = load_mtp(self.name, target=target.model, module=self.module, hidden_state=self.hidden_state)
        else:
            before = self.hidden_state == "before_norm"
            head = MTPHead.for_target(target.model, hidden_first=True, before_norm=before)
        self._fusion = (head.bound(target.model).model.fusion,)
        return head

    def fused(self, states: list[Float[Tensor, "row position hidden"]]) -> Float[Tensor, "row position width"]:
        """The target's state, with the weight of its norm undone where the module reads it from before."""
        return self._fusion[0](states[0])

    def drafter(self) -> Drafter:
        return MTPDrafter(self.copied(), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        save_mtp(self.copied().to(torch.bfloat16), folder, notes=facts)
