"""Loads a model and its tokenizer, for targets and drafters: from where, in which dtype, on which device."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec import bundled
from specdec import inflate as inflation
from specdec.arguments import shown
from specdec.dtypes import DtypeChoice, choose_dtype
from specdec.files import located, looks_local
from specdec.gguf_files import reading
from specdec.llama_shapes import LlamaShape
from specdec.machine import dtype_name
from specdec.memory import onto_disk, ran_out, shortage
from specdec.origin import first_sentence
from specdec.placement import check_device_map, device_of_map, is_spread
from specdec.quantization import check_fast, check_quantization, quantize
from specdec.quantization.checkpoint import check_alone, check_packages, quantized_by, stored_scheme
from specdec.target import parallel
from specdec.target.adapters import config_of, merge

HUB_OPTIONS = {"revision", "code_revision", "subfolder", "token", "cache_dir", "force_download", "local_files_only"}
HUB_OPTIONS |= {"proxies", "trust_remote_code", "gguf_file"}
"""Options that say where files come from and who may read them: configuration, weights and tokenizer get the same."""
_TOKENIZERS = re.compile(r"token|vocab|merges|piece|bpe|spm|tekken")  # in the names of tokenizers' files
_DRAFTERS = re.compile(r"medusa_heads?\.|(?:model\.)?mtp(?:_layers)?\.")  # of drafters stored with their target
_ONE_DEVICE = "the whole model must be on one device, with its weights as they were trained"
_DIVIDED = ("device_map", "tensor_parallel")
_EXCLUDED = {
    ("device", "device_map"): "both say where the model goes",
    ("device_map", "tensor_parallel"): "both say where the model's parts go",
    ("device", "tensor_parallel"): "every process uses its own device",
    ("adapters", "inflate"): _ONE_DEVICE,
    **{(one, map): _ONE_DEVICE for one in ("quantization", "inflate", "adapters") for map in _DIVIDED},
}
"""Options that exclude each other, and why."""


class Loaded(NamedTuple):
    """A model in evaluation mode on its device, and its dtype with the reason for it."""

    model: PreTrainedModel
    dtype_reason: str


def load(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantization: str | None = None,
    quantization_check: bool = True,
    inflate: str | Mapping[str, int] | LlamaShape | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    tensor_parallel: bool | int | None = None,
    adapter: str | None = None,
    adapters: Sequence[str] = (),
    **options: Any,
) -> Loaded:
    """Load a causal LM for use as a target or a drafter; the arguments are those of ``Target.from_pretrained``."""
    check_quantization(quantization)
    if inflate is not None:
        inflation.resolve_shape(inflate)  # refuses a wrong name before anything is loaded
    size = parallel.check_processes(tensor_parallel)
    elsewhere = str(device) not in ("auto", parallel.accelerator() if size > 1 else "auto")
    folders = [*adapters, *([] if adapter is None else [adapter])]
    _check_together(
        device=device if elsewhere else None, device_map=device_map, tensor_parallel=size if size > 1 else None,
        quantization=quantization, inflate=inflate, adapters=folders or None,
    )  # fmt: skip
    for folder in folders:
        config_of(folder)
    if device_map is not None:
        check_device_map(device_map)
    # The device whose arithmetic counts: the one that was asked for, or the main one of a map.
    where = device_of_map(device_map) if isinstance(device_map, Mapping) else resolve_device(device)
    asked = resolve_dtype(dtype)
    path, files = _found(name_or_path, options)
    try:
        with reading(path, files) as gguf:
            config = options.get("config")
            if not isinstance(config, PreTrainedConfig):  # a path to one, or none
                config = load_config(config or name_or_path, **options)
        options |= files
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} is an encoder-decoder model; give a decoder-only causal LM")
        method, stored = quantized_by(config, options.get("quantization_config")), stored_scheme(config)
        if method is not None:
            check_packages(method)
            check_alone(method, quantization=quantization, inflate=inflate)
        for option, given, kept in (("inflate", inflate, stored), ("adapter", adapter, stored or method)):
            if given is not None and kept is not None:
                raise ValueError(f"{option}={given!r}: it is stored in {kept}; give the checkpoint it was made of")
        if size > 1:
            parallel.check_shares(config, size)
            options |= parallel.join(size)
        elif device_map is not None:
            options |= {"device_map": device_map if isinstance(device_map, str) else dict(device_map)}
        elif method is not None:  # quantized weights go to their device while they are read; some cannot be moved later
            options["device_map"] = {"": where}
        named = getattr(config, "dtype", None) if method is None else None
        choice = None if named is None else choose_dtype(named, where)  # None: that of the weights, not known yet
        if isinstance(asked, torch.dtype):
            choice = DtypeChoice(asked, f"{dtype_name(asked)}, as asked for")
        model, report = _read(path, dtype=choice.dtype if choice else "auto", **options)
        if choice is None and method is not None:
            choice = DtypeChoice(model.dtype, f"auto: {dtype_name(model.dtype)}, as in the checkpoint ({method})")
        if choice is None:  # the configuration names no dtype, so that of the weights counts
            choice = choose_dtype(model.dtype, where)
            if choice.dtype is not model.dtype:
                # Loaded again instead of cast, because a cast would also round tables that stay in float32.
                del model
                model, report = _read(path, dtype=choice.dtype, **options)
        _check_complete(type(model).__name__, report, packed=method is not None)
        if stored is not None and is_spread(model):  # device_map="auto" has found no room on one device
            raise ValueError(f"it is stored in {stored}, whose layers are on one device: give device, not device_map")
        if size == 1 and "device_map" not in options:
            model = model.to(where)  # pyright: ignore[reportArgumentType] (transformers' decorator hides self)
    # A missing package (flash-attn, say) is an ImportError, an option that the model does not have a TypeError; a
    # quantizer that wants a GPU raises a RuntimeError.
    except (OSError, ValueError, ImportError, TypeError, RuntimeError) as error:
        failed = f"cannot load the model {str(name_or_path)!r}"
        if ran_out(error):
            remedy = "give device_map='auto', a smaller dtype, or a checkpoint in fewer bits"
            raise ValueError(f"{failed}: {shortage(error, where)}; {remedy}") from error
        nowhere = "" if Path(path).exists() else ", which is no local folder"
        attention = "attn_implementation"
        remedy = f"; leave {attention} out, the engine computes attention itself" if options.get(attention) else ""
        raise ValueError(f"{failed}{nowhere}: {first_sentence(error).rstrip('.')}{remedy}") from error
    model = model.eval()
    if adapter is not None:
        model = merge(model, adapter)
    if inflate is not None:
        model = inflation.inflate(model, inflate)
    if quantization is not None and quantization != stored:
        model = quantize(model, quantization, check=quantization_check)
    elif stored is not None and quantization_check:
        check_fast(model, stored)
    onto_disk(model)
    return Loaded(model, choice.reason if gguf is None else gguf.held(dtype_name(choice.dtype), quantization))


def _check_together(**given: object) -> None:
    for (one, other), why in _EXCLUDED.items():
        if given[one] is not None and given[other] is not None:
            raise ValueError(f"{one}={_said(given[one])} and {other}={_said(given[other])}: {why}; leave one out")


def _said(value: object) -> str:
    return repr(str(value) if isinstance(value, torch.device) else value)


def load_model(name_or_path: str, **options: Any) -> PreTrainedModel:
    """Return the model that ``load`` loads."""
    return load(name_or_path, **options).model


def load_config(name_or_path: str, **options: Any) -> PreTrainedConfig:
    """Return a model's configuration; that of a GGUF file names the dtype to hold its weights in."""
    path, files = _files(name_or_path, options)
    with reading(path, files) as gguf:
        config = AutoConfig.from_pretrained(path, **files)
    if gguf is not None:
        config.dtype = getattr(torch, gguf.dtype)
    return config


def find_tokenizer(name_or_path: str, **options: Any) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that belongs to a model, or return None for a folder or a GGUF file that has none."""
    path, files = _files(name_or_path, options)
    folder = Path(path, files.get("subfolder") or "")
    there = not folder.is_dir() or any(_TOKENIZERS.search(each.name) for each in folder.iterdir())
    with reading(path, files) as gguf:
        there = there if gguf is None else gguf.has_tokenizer
    return load_tokenizer(name_or_path, **options) if there else None


def load_tokenizer(name_or_path: str, **options: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model, from where the options of ``load`` say that files come from."""
    path, files = _files(name_or_path, options)
    try:
        with reading(path, files) as gguf:
            if gguf is not None and not gguf.has_tokenizer:
                raise ValueError("the file holds none")
            return AutoTokenizer.from_pretrained(path, **files)
    except (OSError, ValueError) as error:
        message = f"no tokenizer for {name_or_path!r}: {first_sentence(error).rstrip('.,')}"
        raise ValueError(f"{message}; a target takes another one as tokenizer=FOLDER") from error


def _read(path: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model, and transformers' report about its tensors, those of a wrong shape among them."""
    read: Any = AutoModelForCausalLM.from_pretrained
    with reading(path, options) as gguf:
        if gguf is not None:  # else its weights stay packed in modules that nothing here knows
            from transformers import GgufConfig

            options["quantization_config"] = GgufConfig(dequantize=True)
        return read(path, **options | {"output_loading_info": True, "ignore_mismatched_sizes": True})


def _check_complete(kind: str, report: Mapping[str, Any], *, packed: bool) -> None:
    """Refuse a model of which some weights are random numbers, or whose files are another model's.

    ``report`` leaves out what is tied or computed. Packages that quantize (``packed``) store tensors of their own.
    """
    more = () if packed else report.get("unexpected_keys", ())
    modules = tuple(key.removesuffix("eh_proj.weight") for key in more if key.endswith(".eh_proj.weight"))
    more = [key for key in more if not _DRAFTERS.match(key) and not key.startswith(modules)]
    shapes = [f"{key} {list(there)} in place of {list(due)}" for key, there, due in report.get("mismatched_keys", ())]
    parts = {"missing": report.get("missing_keys", ()), "of another shape": shapes, "of another model": more}
    wrong = [f"{what}: {listed(sorted(names))}" for what, names in parts.items() if names]
    if wrong:
        whole = "give the files of a whole model, and those of a head to its own drafter (eagle, block, mtp, medusa)"
        raise ValueError(f"as {kind} {'; '.join(wrong)}; {whole}")


def listed(names: Sequence[str]) -> str:
    """Return some names in words, the first few if they are many."""
    few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"the tensor {few}" if len(names) == 1 else f"the tensors {few}"


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device of a name, which torch must be able to use; ``"auto"`` is the GPU if there is one."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device) if isinstance(device, str | torch.device) else None
        if found is not None and found.type != "meta":  # which holds shapes and no numbers
            torch.empty(1, device=found)
            return found
        reason = "no device with numbers"
    except Exception as error:  # every kind of device has an error of its own where it is missing
        reason = first_sentence(error).split(". ", 1)[0]
    raise ValueError(f"device={_said(device)}: {reason}; give 'auto', 'cpu', 'cuda' or 'cuda:1', if torch can use it")


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype with this name in torch; ``"auto"`` stays as it is."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: give 'auto', 'float32', 'bfloat16' or 'float16'")
    return resolved


def _files(name_or_path: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name or path that transformers is given, and those of the options that are in ``HUB_OPTIONS``."""
    return located(bundled.resolve(name_or_path), {key: each for key, each in options.items() if key in HUB_OPTIONS})


def _found(name_or_path: str | Path, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return ``_files``; refuse a path without a model, which transformers would look up."""
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise ValueError(f"the model is {shown(name_or_path)}: give a name on the hub, or the path of a folder")
    path, files = _files(str(name_or_path), options)
    subfolder = files.get("subfolder") or ""
    folder = Path(path) / subfolder
    if not looks_local(path) or (folder / (files.get("gguf_file") or "config.json")).is_file():
        return path, files
    there = "it is no GGUF file, and no folder with a config.json or a GGUF file"
    reason = there if folder.exists() else "there is no such file or folder"
    if (folder / "adapter_config.json").is_file():
        reason = f"it is an adapter, give the name of its model, and adapter={folder}"
    where = f"{str(name_or_path)!r}" + (f", subfolder {subfolder!r}" if subfolder else "")
    raise ValueError(f"no model at {where}: {reason}")
