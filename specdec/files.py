"""The files of a model: where they are by its name, and what a GGUF file (the format of llama.cpp) says of itself.

One GGUF file holds configuration, tokenizer, chat template, and weights in 2 to 32 bits, of which transformers makes
plain ones. Its reader takes seconds for a vocabulary, for every part anew: that of ``reading`` takes a tenth.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

MODELS = "SPECDEC_MODELS"
"""The environment variable with a folder of models, for machines without a network."""
SHORT = {
    "openai_humaneval": "humaneval.jsonl",
    "smollm2-135m-instruct": "smollm2-135m",
    "gemma-3-270m": "gemma3-270m",
    "qwen2.5-coder-0.5b-instruct": "qwen-coder-0.5b",
    "qwen2.5-coder-1.5b-instruct": "qwen-coder-1.5b",
}
"""Other names that folders and files of some models and datasets may have there."""
_GGUF = ".gguf"


def offline(name: str) -> str:
    """Return the place of ``OWNER/NAME`` in ``SPECDEC_MODELS``, its ``NAME`` in lower case or its ``SHORT`` one.

    Without the variable or such a place, and for every other text, returns the name itself.
    """
    owner, _, own = name.lower().partition("/")
    top = os.environ.get(MODELS)
    if not top or not owner or not own or "/" in own or looks_local(name):
        return name
    places = (Path(top).expanduser() / each for each in (own, SHORT.get(own, own)))
    return str(next((place for place in places if place.exists()), name))


def looks_local(path: str) -> bool:
    """Return whether a text is a path on this machine and not a name on the hub, ``OWNER/NAME`` or ``NAME``."""
    if Path(path).exists() or Path(path).is_absolute() or path.startswith((".", "~")) or "\\" in path:
        return True
    first, *others = path.split("/")
    return path.endswith(_GGUF) or len(others) > 1 or (len(others) == 1 and (others == [""] or Path(first).is_dir()))


def located(path: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a path and options as transformers takes them: of a GGUF file its folder, and its name as an option.

    A folder without ``config.json`` stands for the one such file in it. Raises ValueError: it has several, or no name.
    """
    place, where = Path(path, options.get("subfolder") or ""), dict(options)
    if not isinstance(file := where.get("gguf_file"), str | None) or file == "":
        raise ValueError(f"gguf_file={file!r}: give the name of a file of this model, as in gguf_file=NAME.gguf")
    if file is None and place.is_dir() and not (place / "config.json").is_file():
        files = sorted(place.glob(f"*{_GGUF}"))
        if len(files) > 1:
            raise ValueError(f"no model at {path!r}: it has {len(files)} GGUF files, give one, as {files[0].name}")
        place = files[0] if files else place
    if place.suffix == _GGUF and place.is_file():
        return str(place.parent), where | {"gguf_file": place.name, "subfolder": ""}
    return path, where


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
    """Have transformers read a GGUF file (``located``) by ``_reader``; yield what it says, None for other files.

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
    said = _said(file, file.stat().st_mtime_ns)
    before: Any = gguf.GGUFReader, legacy.tqdm
    gguf.GGUFReader, legacy.tqdm = _reader(), logging.tqdm  # whose bars obey transformers' own switch
    try:
        yield said
    finally:
        gguf.GGUFReader, legacy.tqdm = before


@lru_cache(maxsize=8)
def _said(file: Path, stamp: int) -> GGUF:
    """Return what a file says that was last changed at ``stamp``."""
    from gguf import LlamaFileType

    try:
        found = _reader()(file)
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


@cache
def _reader() -> Any:
    """Return a class that reads a list at once where GGUFReader reads number by number, and word by word."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            is_list = raw_type == GGUFValueType.ARRAY and self.byte_order == "I"
            kind = self._get(orig_offs, np.uint32)
            if not is_list or kind[0] == GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            count, end, of = self._get(orig_offs + 4, np.uint64), orig_offs + 12, GGUFValueType(kind[0])
            raw, parts = self.data.view(np.ndarray), []
            if of in self.gguf_scalar_to_np:
                values = self._get(end, self.gguf_scalar_to_np[of], count[0])
                end, parts = end + values.nbytes, [*values[:, None]]
            for _ in range(count[0] if of == GGUFValueType.STRING else 0):
                (length,) = struct.unpack_from("<Q", raw.data, end)
                parts.append(raw[end + 8 : end + 8 + length])
                end += 8 + length
            return end - orig_offs, [kind, count, *parts], list(range(2, 2 + len(parts))), [GGUFValueType.ARRAY, of]

    return Reader
