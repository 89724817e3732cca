"""Facts that a GGUF file (the format of llama.cpp) says of itself, and a fast way for transformers to read it.

One such file holds configuration, tokenizer, chat template, and weights in 2 to 32 bits, of which transformers makes
plain ones. It reads a vocabulary word by word, for every part anew: that takes minutes where seconds do.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_ROWS = 1 << 12  # of a weight that are dequantized at once


class GGUF(NamedTuple):
    """The facts of a file: its ``kind``, as ``Q4_K_M``, bits per weight, and the name of the dtype to hold them in."""

    kind: str
    bits: float
    dtype: str
    has_tokenizer: bool

    def held(self, dtype: str, quantization: str | None) -> str:
        """Return in words what became of its weights, for the heading of a table."""
        now = "held as " if quantization is None else f"requantized to {quantization}, computing in "
        return f"{self.kind} file, {self.bits:.1f} bits a weight, {now}{dtype}"


@contextmanager
def reading(path: str, where: Mapping[str, Any]) -> Iterator[GGUF | None]:
    """Have transformers read a GGUF file (``located``) once and fast; yield what it says, None for other files.

    Raises ValueError: the package is missing, or the file is none, is cut off, or is a part of one.
    """
    if where.get("gguf_file") is None:
        yield None
        return
    if find_spec("gguf") is None:
        raise ValueError("GGUF files need the package gguf: pip install 'specdec-research[gguf]'")
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.utils import cached_file, logging

    options = {name: where[name] for name in where.keys() - {"gguf_file", "trust_remote_code", "code_revision"}}
    file = Path(str(cached_file(path, where["gguf_file"], **options)))
    stamp = file.stat().st_mtime_ns
    ours = {
        (gguf, "GGUFReader"): lambda path: _read(Path(path), stamp), (gguf, "dequantize"): _dequantized,
        (gguf, "get_tensor_name_map"): cache(gguf.get_tensor_name_map),  # asked for every module
        (legacy, "_gguf_parse_value"): _parsed, (legacy, "tqdm"): logging.tqdm,  # bars that obey transformers' switch
    }  # fmt: skip
    with ExitStack() as stack:
        for (module, name), made in ours.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, made)
        yield _said(file, stamp)


@lru_cache(maxsize=8)
def _said(file: Path, stamp: int) -> GGUF:
    """Return what a file says that was last changed at ``stamp``."""
    from gguf import LlamaFileType

    try:
        found = _read(file, stamp)
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise ValueError(f"{file} is no GGUF file, or is cut off: download it again") from error
    numbers = {key: int(field.parts[-1][0]) for key, field in found.fields.items() if len(field.parts[-1]) == 1}
    if (parts := numbers.get("split.count", 1)) > 1:
        raise ValueError(f"{file} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
    kinds = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    kind = kinds.get(numbers.get("general.file_type", -1), "GGUF")
    bits = 8 * sum(each.n_bytes for each in found.tensors) / sum(each.n_elements for each in found.tensors)
    dtype = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    return GGUF(kind, float(bits), dtype, "tokenizer.ggml.tokens" in found.fields)


@lru_cache(maxsize=2)
def _read(file: Path, stamp: int) -> Any:
    """Return a file's reader, which reads a list at once where GGUFReader reads number by number, and word by word."""
    import numpy as np
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader  # the name in gguf is taken while a file is read

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            is_list = raw_type == GGUFValueType.ARRAY and self.byte_order == "I"
            kind = self._get(orig_offs, np.uint32)
            if not is_list or kind[0] == GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            count, end, of = self._get(orig_offs + 4, np.uint64), orig_offs + 12, GGUFValueType(kind[0])
            raw, parts = self.data.view(np.ndarray).data, list[Any]()
            if of in self.gguf_scalar_to_np:
                values = self._get(end, self.gguf_scalar_to_np[of], count[0])
                parts[:], end = zip(values.tolist(), strict=True), end + values.nbytes
            for _ in range(count[0] if of == GGUFValueType.STRING else 0):
                (length,) = struct.unpack_from("<Q", raw, end)
                parts.append(bytes(raw[end + 8 : end + 8 + length]))
                end += 8 + length
            return end - orig_offs, [kind, count, *parts], list(range(2, 2 + len(parts))), [GGUFValueType.ARRAY, of]

    return Reader(file)


def _parsed(value: Any, types: Any) -> Any:
    """Return a text, a number or a truth value, by the format's number for its type, the last of ``types``."""
    kind = types[-1] if isinstance(types, list) else types
    return bytes(value).decode() if kind == 8 else {7: bool, 6: float, 12: float}.get(kind, int)(value[0])


def _dequantized(data: Any, kind: Any) -> Any:
    """Return a weight in float32: by torch's threads, if transformers has them for its kind."""
    import torch
    from gguf import quants

    with suppress(ImportError, ValueError):
        from transformers.integrations.gguf.dequant import dequantize

        rows = data.reshape(-1, data.shape[-1])  # of all experts
        parts = [dequantize(torch.tensor(rows[at : at + _ROWS]), kind) for at in range(0, len(rows), _ROWS)]
        return torch.cat(parts).numpy().reshape(*data.shape[:-1], -1)
    return quants.dequantize(data, kind)
