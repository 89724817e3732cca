"""Drafts with the modules for multi-token prediction that many models ship with (DeepSeek-V3, arXiv 2412.19437)."""

from pathlib import Path

from drafters.feature import FeatureDrafter
from drafters.heads.base import FeatureHead
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import MTPFiles
from drafters.heads.trained_on import trained_on
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree, tree_of
from specdec.target.target import Target
from specdec.types import DraftSampling


class MTPDrafter(FeatureDrafter):
    """Drafts with one module, which reads its own output for the second token and those after it.

    Args:
        head: The module, or where it is found when the target is known (``from_pretrained``).
        shape: A tree builder, or what ``TreeShape.of`` takes. Modules are trained to look one or a few tokens ahead.
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` or ``"coupled"``; None for ``"deterministic"`` with a tree of the most probable paths,
            and ``"iid"`` with a shape.
        temperature: The drafter's own; None follows each request.
        attention: See ``ModelRunner``; for the module's forwards.
        optimize: See ``ModelRunner``; for the module's forwards.
        kv_cache: See ``ModelRunner``; for the module's keys and values.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        head: MTPHead | MTPFiles,
        shape: AnyTree = 3,
        *,
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
    ):
        instance("head", head, (MTPHead, MTPFiles), "a module, or load one with MTPDrafter.from_pretrained(…)")
        self._files = head if isinstance(head, MTPFiles) else None
        super().__init__(
            head if isinstance(head, MTPHead) else None,
            tree_of(shape),
            sampling=sampling,
            temperature=temperature,
            name="MTP module" if self._files is None or not self._files.name else self._files.name,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        *,
        shape: AnyTree = 3,
        module: int = 0,
        hidden_state: str = "auto",
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        any_target: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "MTPDrafter":
        """Take the module from files. They are read by ``bind``, because a module is made like the target's layers.

        Args:
            path: A folder or a name on the hub; None for the target's own checkpoint.
            shape: See the class.
            module: Which of the checkpoint's modules, from 0.
            hidden_state: Which state of the target the module reads first, ``"after_norm"`` or ``"before_norm"``;
                ``"auto"`` for what the checkpoint's family is known to read. The wrong one costs acceptance and nothing
                else, so try both.
            sampling: See the class.
            temperature: See the class.
            attention: See the class.
            optimize: See the class.
            kv_cache: See the class.
            any_target: Whether it may run on another target than the one that its ``training.json`` names.
            revision: Branch, tag or commit of the hub repository.
            subfolder: Folder of the checkpoint within the local folder or the hub repository.
            token: For a repository that is not public.
            cache_dir: Where downloaded files are kept.
            force_download: Download files again even if they are there.
            local_files_only: Use only files that are there, without asking the hub.
        """
        where = {
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        drafter = cls(
            MTPFiles(path, module=module, hidden_state=hidden_state, where=where),
            shape,
            sampling=sampling,
            temperature=temperature,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )
        if path is not None and not any_target:
            drafter.trained_on = trained_on(path, **where)
        return drafter

    def head_for(self, target: Target) -> FeatureHead:
        """Return the module that was given, or else read it from its files."""
        return self.head if self._files is None else self._files.load(target.model)
