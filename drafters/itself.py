"""The target as its own drafter: without some of its layers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from transformers import PreTrainedModel

from drafters.layers import checked, chosen_parts, layers_of, leave_out, search
from drafters.own_model import CausalDrafter, Settings, twin_of
from specdec.arguments import shown
from specdec.drafting.builders import AnyTree, tree_of
from specdec.target.target import Target

SEARCH = "give drafter.search={} to search for it, and write it there"


class SelfDrafter(CausalDrafter):
    """Drafts with the target itself, of which something is left out. It shares the target's weights.

    Args:
        skip: The layers and parts of layers that are left out: ``[4, 2.mlp, 8-31]``; layers are counted from 0. Or a
            JSON file with such a list under ``skip``. The first layers alone (early exit) are those before ``k-N``.
        shape: What ``TreeShape.of`` takes (a chain's length, branching factors, or paths), or a tree builder.
        search: The settings of ``drafters.layers.search``. Where there is no file ``skip``, the search is made and the
            file written when an engine is built.

    Raises:
        ValueError: Nothing was given to leave out, or an argument is wrong.
    """

    def __init__(
        self,
        skip: Sequence[str | int] | str | Path,
        shape: AnyTree = 4,
        *,
        search: Mapping[str, Any] | None = None,
        **options: Unpack[Settings],
    ):
        self.search = None if search is None else checked(search)
        self.file = Path(skip).expanduser() if isinstance(skip, str | Path) else None
        if self.file is None and search is not None:
            raise ValueError(f"search needs a file to write to: give skip=FILE in place of skip={shown(skip)}")
        if self.file is not None and self.search is None and not self.file.is_file():
            raise ValueError(f"skip={skip}: there is no such file; {SEARCH}")
        if not isinstance(skip, str | Path | Sequence) or not skip:
            raise ValueError(f"skip={shown(skip)}: give layers or parts of them, such as [4, 2.mlp, 8-31], or a file")
        super().__init__(tree_of(shape), name=f"the target without {shown(skip)}", **options)
        self.skip = skip

    def model_for(self, target: Target) -> PreTrainedModel:
        """Returns the target's own layers, some of them left out."""
        twin = twin_of(target.model)
        leave_out(twin, chosen_parts(twin, self._chosen(target)))
        return twin

    def _chosen(self, target: Target) -> Sequence[str | int]:
        if self.file is None:
            return list(self.skip)  # pyright: ignore[reportArgumentType] (no file, so a list)
        layers = len(layers_of(target.model))
        if not self.file.is_file():
            return self._found(self.file, target, layers)
        try:
            said = json.loads(self.file.read_text(encoding="utf-8"))
            skip, count = said["skip"], said.get("layers", layers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"skip={self.file}: this is no JSON object with a list skip; {SEARCH}") from error
        if count != layers:
            raise ValueError(
                f"skip={self.file} was found for {said.get('target')} of {count} layers, and the target {target.name} "
                f"has {layers}: give another file, or another target"
            )
        return skip

    def _found(self, file: Path, target: Target, layers: int) -> Sequence[str]:
        """Search, and write what was found in one step."""
        assert self.search is not None, "checked when the drafter was made"
        found = search(target, twin_of(target.model), depth=self.max_depth, **self.search)
        said = {
            "target": target.name,
            "layers": layers,
            **asdict(found),
            "depth": self.max_depth,
            "search": self.search,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        part.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        os.replace(part, file)
        return found.skip
