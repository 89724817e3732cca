"""Medusa's decoding heads (Cai et al. 2024, arXiv 2401.10774, section 2.1) and their checkpoint format."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.heads.assemble import check_finite
from specdec.arguments import whole
from specdec.target.loading import listed, looks_local, resolve_device

_KEY = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_PREFIX = "medusa_head."  # in the state dict of a whole model that was trained together with its heads
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class ResidualBlock(nn.Module):
    """Computes ``x + SiLU(W x + b)``. W and b begin at zero, so that a new head starts as its output layer alone."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Heads that predict several tokens ahead from the target's last hidden state.

    Where the target's own output layer predicts token t+1 from the (normalized) hidden state at t, head ``i``
    predicts token t+2+i. Each head is ``num_layers`` passes through one residual block, then an output layer.

    Args:
        num_heads: The number of heads, which is how many tokens they look ahead beyond the target's own.
        hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        num_layers: Passes through the head's residual block. The published code repeats *one* block
            (``[ResBlock(hidden_size)] * num_layers``), so the weights of all layers are shared.
        base_model: Name of the target they were trained on; kept in ``config.json``.
    """

    def __init__(self, *, num_heads: int, hidden_size: int, vocab_size: int, num_layers: int = 1, base_model: str = ""):
        super().__init__()
        for name, value, least in (
            ("num_heads", num_heads, 1),
            ("hidden_size", hidden_size, 1),
            ("vocab_size", vocab_size, 1),
            ("num_layers", num_layers, 0),
        ):
            whole(name, value, least=least)
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.base_model = base_model
        heads = []
        for _ in range(num_heads):
            block = ResidualBlock(hidden_size)
            heads.append(nn.Sequential(*[block] * num_layers, nn.Linear(hidden_size, vocab_size, bias=False)))
        self.heads = nn.ModuleList(heads)

    def forward(
        self, hidden: Float[Tensor, "*rows hidden"], num_heads: int | None = None
    ) -> Float[Tensor, "head *rows vocab"]:
        """Returns the logits of the first ``num_heads`` heads (default: all)."""
        return torch.stack([head(hidden) for head in self.heads[:num_heads]])

    def widened(self, hidden_size: int) -> "MedusaHeads":
        """Returns the same heads for wider hidden states, of which only the first channels carry signal.

        They compute the same, at the cost of heads of the larger width. They are for a target inflated by
        ``specdec.inflate``, whose other channels are not read.
        """
        first = self.heads[0][-1].weight  # type: ignore[index]
        wide = MedusaHeads(
            num_heads=self.num_heads,
            hidden_size=hidden_size,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            base_model=self.base_model,
        ).to(device=first.device, dtype=first.dtype)
        with torch.no_grad():
            for name, parameter in wide.heads.named_parameters():
                old = self.heads.get_parameter(name)
                parameter.zero_()[tuple(slice(size) for size in old.shape)] = old
        return wide.eval()

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``config.json`` and ``medusa_lm_head.safetensors`` in FasterDecoding's first format.

        The tensors are ``{head}.{layer}.linear.weight|bias`` and ``{head}.{num_layers}.weight``. Shared layers
        are written once per layer, as the published checkpoints have them.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        # Clones, because safetensors refuses tensors that share memory.
        tensors = {key: tensor.detach().clone().contiguous() for key, tensor in self.heads.state_dict().items()}
        save_file(tensors, path / _FILES[0], metadata={"format": "pt"})
        config = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "base_model_name_or_path": self.base_model,
        }
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "MedusaHeads":
        """Load heads in FasterDecoding's first format.

        Heads, layers and widths are read from the tensors, because the ``medusa_num_heads`` of uploaded configs
        is often wrong (2 where there are 5).

        Args:
            path: Folder or hub repository with ``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``, or such a
                file itself. In a file whose keys begin with ``medusa_head.``, as they do in a whole model that was
                trained with its heads, all other tensors are ignored.
            dtype: Dtype to load into; the checkpoint's own when None.
            device: Where to put them.
            revision: Branch, tag or commit of the hub repository.
            subfolder: Folder of the checkpoint within the local folder or the hub repository.
            token: For a repository that is not public.
            cache_dir: Where downloaded files are kept.
            force_download: Download files again even if they are there.
            local_files_only: Use only files that are there, without asking the hub.

        Raises:
            ValueError: There is no checkpoint, or its tensors are not in this format.
        """
        where = resolve_device(device)
        file = _find_checkpoint(
            path,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        tensors = _read(file)
        for key, tensor in tensors.items():
            check_finite(str(file), key, tensor)
        layers, outputs = _sort(tensors, file)
        num_heads, num_layers = len(outputs), len(layers) // (2 * len(outputs))
        vocab_size, hidden_size = outputs[0].shape
        with torch.device("meta"):  # the tensors take the parameters' place, so nothing is allocated or drawn
            heads = cls(
                num_heads=num_heads,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                num_layers=num_layers,
                base_model=_base_model(file.parent),
            )
        state = {f"{head}.{layer}.{name}": tensor for (head, layer, name), tensor in layers.items()}
        state |= {f"{head}.{num_layers}.weight": tensor for head, tensor in outputs.items()}
        for key, wanted in heads.heads.state_dict().items():
            if state[key].shape != wanted.shape:
                raise ValueError(
                    f"{file} holds tensors of unequal widths: {key} has the shape {list(state[key].shape)} and the "
                    f"others call for {list(wanted.shape)}"
                )
        heads.heads.load_state_dict(state, assign=True)
        return heads.to(device=where, dtype=dtype or outputs[0].dtype).eval()


def _read(file: Path) -> dict[str, Tensor]:
    """Returns a file's tensors; only those of the heads if the file marks them."""
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as a checkpoint: {str(error).split(chr(10), 1)[0]}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is not a dict of tensors: give the file that Medusa's training wrote")
    marked = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items() if key.startswith(_PREFIX)}
    return marked or dict(tensors)


def _sort(tensors: dict[str, Tensor], file: Path) -> tuple[dict[tuple[int, int, str], Tensor], dict[int, Tensor]]:
    """Returns the residual blocks' tensors by head, layer and name, and the output layers' by head.

    Raises:
        ValueError: Something is missing or superfluous, or the layers of a head differ.
    """
    layers: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[int, tuple[int, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{file} holds the tensor {key!r}, which is not of the form '0.0.linear.weight', '0.0.linear.bias' or "
                f"'0.1.weight': convert the checkpoint to FasterDecoding's Medusa format"
            )
        head, layer, name = int(match[1]), int(match[2]), match[3]
        if name == "weight":
            outputs[head] = (layer, tensor)
        else:
            layers[head, layer, name] = tensor
    num_heads = 1 + max([*outputs, *(head for head, _, _ in layers)], default=-1)
    num_layers = 1 + max((layer for _, layer, _ in layers), default=-1)
    parts = ("linear.weight", "linear.bias")
    wanted = {(head, layer, part) for head in range(num_heads) for layer in range(num_layers) for part in parts}
    missing = [".".join(map(str, key)) for key in sorted(wanted - set(layers))]
    # The output layer is counted as one more layer of its head.
    missing += [f"{head}.{num_layers}.weight" for head in range(num_heads) if outputs.get(head, (-1,))[0] != num_layers]
    if missing or not num_heads:
        raise ValueError(
            f"{file} is incomplete: {num_heads} heads of {num_layers} layers have {2 * num_heads * num_layers} block "
            f"tensors and {num_heads} output layers, and {listed(missing or ['0.0.linear.weight'])} "
            f"{'are' if len(missing) > 1 else 'is'} missing; "
            f"formats without output layers (Medusa 'version 2') are not read here"
        )
    for (head, layer, name), tensor in layers.items():
        if not torch.equal(tensor, layers[head, 0, name]):
            raise ValueError(
                f"{file}: layer {layer} of head {head} differs from its layer 0, but the published Medusa "
                f"architecture repeats one shared block; this checkpoint is of another architecture"
            )
    return layers, {head: tensor for head, (_, tensor) in outputs.items()}


def _find_checkpoint(path: str | Path, *, subfolder: str | None = None, **download: Any) -> Path:
    """Returns the file with the tensors: the path itself, one in that folder, or one downloaded from the hub."""
    folder = Path(path)
    if folder.is_file():
        return folder
    if folder.is_dir():
        folder = folder / (subfolder or "")
    if folder.is_dir():
        for name in _FILES:
            if (folder / name).is_file():
                return folder / name
        raise ValueError(f"no Medusa checkpoint in {folder}: expected {' or '.join(_FILES)}")
    if looks_local(str(path)):
        raise ValueError(f"no Medusa checkpoint at {folder}: there is no such folder")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for name in _FILES:
        try:
            file = hf_hub_download(str(path), name, subfolder=subfolder, **download)
        except LocalEntryNotFoundError as error:
            raise ValueError(
                f"no Medusa checkpoint at {path!r}: not a local folder, and the hub cannot be reached"
            ) from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ValueError(
                f"no Medusa checkpoint at {path!r}: not a local folder, and the hub says: {error}"
            ) from error
        try:
            hf_hub_download(str(path), "config.json", subfolder=subfolder, **download)
        except (EntryNotFoundError, HfHubHTTPError):
            pass  # only the base model's name would have come from it
        return Path(file)
    raise ValueError(f"no Medusa checkpoint in the hub repository {path!r}: expected {' or '.join(_FILES)}")


def _base_model(folder: Path) -> str:
    config = folder / "config.json"
    return json.loads(config.read_text()).get("base_model_name_or_path") or "" if config.is_file() else ""
