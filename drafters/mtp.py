"""Drafts with the modules for multi-token prediction that many models ship with (DeepSeek-V3, arXiv 2412.19437)."""

from pathlib import Path
from typing import Any

from drafters.feature import FeatureDrafter
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import HIDDEN, load_mtp
from specdec.arguments import whole
from specdec.drafting.builders import AnyTree, ExpansionTree
from specdec.modeling.target import Target
from specdec.types import DraftSampling


class MTPDrafter(FeatureDrafter):
    """Drafts with one module, which reads its own output for the second token and those after it.

    Args:
        head: A module, or where to find one: a folder or a name on the hub. None for the target's own checkpoint.
        tree: A tree builder, or what ``TreeShape.of`` takes.
        module: Which of the checkpoint's modules, from 0.
        hidden_state: Which state of the target the module reads first, ``"after_norm"`` or ``"before_norm"``;
            ``"auto"`` for what the checkpoint's family is known to read. The wrong one costs acceptance and nothing
            else, so try both.
        sampling: How siblings are drawn for sampled requests; None for ``"deterministic"`` with a tree of the most
            probable paths, and ``"iid"`` with a shape.
        temperature: The drafter's own; None follows each request.
        attention: See ``ModelRunner``; for the module's forwards.
        optimize: See ``ModelRunner``; for the module's forwards.
        kv_cache: See ``ModelRunner``; for the module's keys and values.
        **where: Where files come from: ``revision``, ``subfolder``, ``token``, ``cache_dir``, ``force_download``,
            ``local_files_only``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    hidden_layers = (-1,)

    def __init__(
        self,
        head: MTPHead | str | Path | None = None,
        tree: AnyTree = 3,
        *,
        module: int = 0,
        hidden_state: str = "auto",
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        **where: Any,
    ):
        if hidden_state not in HIDDEN:
            raise ValueError(f"hidden_state={hidden_state!r}: give one of {', '.join(HIDDEN)}")
        self._path = head if isinstance(head, str | Path) else None
        self._module, self._hidden_state, self._where = whole("module", module, least=0), hidden_state, where
        if sampling is None:
            sampling = DraftSampling.DETERMINISTIC if isinstance(tree, ExpansionTree) else DraftSampling.IID
        super().__init__(
            head if isinstance(head, MTPHead) else None,
            tree,
            sampling=sampling,
            temperature=temperature,
            name=str(self._path or "MTP module"),
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    def bind(self, target: Target, *, max_batch_size: int, max_length: int, leaf_probs: bool = False) -> None:
        """Load the module, if none was given; check that it fits the target, and allocate its cache."""
        if self._head is None:
            path = self._path or target.model.config.name_or_path
            if not path:
                raise ValueError(
                    f"the target {target.name} was not loaded from files, so its MTP module cannot be found: "
                    f"give the module, or the folder that it is in"
                )
            options = {name: value for name, value in self._where.items() if value is not None}
            self._head = load_mtp(path, target.model, module=self._module, hidden_state=self._hidden_state, **options)
        super().bind(target, max_batch_size=max_batch_size, max_length=max_length, leaf_probs=leaf_probs)
