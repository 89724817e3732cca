"""A tiny random model of any type that transformers knows, the comparison that it must pass, and the table of results.

    python -m tests.architectures      try every type; write this version's column

``architectures.yaml`` has the fields by which configurations become small, and what some types need besides.
"""

import csv
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import DraftTree, ModelRunner, TreeShape
from specdec.cache.transformers_cache import cache_argument
from tests.forwards import prefill, verify

VOCAB = 64
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

FIELDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SMALL: dict[str, Any] = FIELDS["small"]
OVERRIDES: dict[str, dict[str, Any]] = FIELDS["overrides"]


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small configuration of a type, composite ones included."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_small(cls, OVERRIDES.get(model_type, {}) | overrides))


def _small(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    aliases = getattr(cls, "attribute_map", {})
    fields = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", {}), *aliases}
    values = {aliases.get(name, name): value for name, value in SMALL.items() if name in fields}
    for name, part in cls.sub_configs.items():
        kind = getattr(part, "model_type", "")
        if not kind:  # a configuration of any type, with a default
            default = getattr(cls, "sub_configs_defaults", {}).get(name)
            kind = getattr(default, "model_type", "")
        if kind in CONFIG_MAPPING:
            values[name] = {"model_type": kind} | _small(CONFIG_MAPPING[kind], OVERRIDES.get(kind, {}))
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = values[name] | value if both else value
    return values


def tiny(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in float32 whose next token depends on its whole context."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    # SDPA leaves out softcaps and sinks in some versions; a model's own attention is what it means.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(10.0 if "emb" in name or "wte" in name else 3.0)
        else:  # biases and gates start at zero, where they would do nothing
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


LENGTHS = (11, 4, 17)
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PATH = ((1, 4, -1), (2, 5, -1), (-1, -1, -1))
MAX_LENGTH = 64
TOLERANCE = 1e-5


@torch.inference_mode()
def disagreement(model: PreTrainedModel) -> tuple[float, ModelRunner]:
    """Three ragged rows, prefilled in chunks, with a branching tree each, then a commit."""
    runner = ModelRunner(model, max_batch_size=3, max_length=MAX_LENGTH, max_nodes=SHAPE.num_nodes)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    starts = np.zeros(3, dtype=np.int64)
    while (starts < LENGTHS).any():
        counts = np.clip(np.array(LENGTHS) - starts, 0, 5)
        tokens = torch.zeros(3, counts.max(), dtype=torch.long)
        for row, start, count, chunk in zip(rows, starts, counts, tokens, strict=True):
            chunk[:count] = row[start : start + count]
        prefill(runner, tokens, starts, counts=counts)
        starts = starts + counts
    tree = DraftTree.from_shape(SHAPE, torch.randint(0, VOCAB, (3, SHAPE.num_nodes + 1), generator=generator))
    lengths = torch.tensor(LENGTHS)
    logits = verify(runner, tree, LENGTHS).scores
    errors, scale = [], 0.0
    for b, row in enumerate(rows):
        for node in range(tree.width):
            own = _plain(model, row, tree.tokens[b, tree.ancestors[b, node].nonzero()[:, 0]])
            errors.append((logits[b, node] - own).abs().max())
            scale = max(scale, float((own - own.mean()).abs().max()))
    path = torch.tensor(PATH)
    runner.cache.commit(torch.arange(3), lengths, path)
    longer = lengths + 1 + (path >= 0).sum(1)
    roots = torch.tensor([3, 5, 7])
    logits = verify(runner, DraftTree.root_only(roots), longer).scores
    for b, row in enumerate(rows):
        kept = torch.cat([torch.zeros(1, dtype=torch.long), path[b][path[b] >= 0]])
        own = _plain(model, row, torch.cat([tree.tokens[b, kept], roots[b : b + 1]]))
        errors.append((logits[b, 0] - own).abs().max())
    return float(torch.stack(errors).max()) / scale, runner


def _plain(model: PreTrainedModel, row: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    return model(input_ids=torch.cat([row, path])[None], use_cache=False).logits[0, -1]


@torch.inference_mode()
def own_error(model: PreTrainedModel) -> float:
    """How far the model's own decoding is from a plain forward, relative to the largest logit; 0 if it has no cache."""
    tokens = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))
    wanted, past, errors = model(input_ids=tokens, use_cache=False).logits[0], None, []
    name = cache_argument(inspect.signature(type(model).forward).parameters)
    for position in range(3, tokens.shape[1]):
        given = {} if past is None else {name: past}
        piece = tokens[:, : position + 1] if past is None else tokens[:, position : position + 1]
        output = model(input_ids=piece, use_cache=True, **given)
        past = getattr(output, name, None)
        if past is None:
            return 0.0
        errors.append((output.logits[0, -1] - wanted[position]).abs().max())
    return float(torch.stack(errors).max() / wanted.abs().max())


TABLE = Path(__file__).with_suffix(".csv")
"""Every type that was tried: a cell per version of transformers, and the reason where it is refused."""
VERSION = ".".join(transformers.__version__.split(".")[:2])


def outcome(model_type: str) -> tuple[str, str]:
    """Try a model type: the cell of the table, and the reason where it is refused."""
    try:
        model = tiny(model_type)
    except Exception as error:  # whatever its constructor finds missing in a guessed configuration; the table has it
        return "?", _sentence(str(error))
    try:
        error, runner = disagreement(model)
    except ValueError as refusal:
        if str(refusal).startswith("max_length"):
            raise AssertionError(f"{model_type}: the test is too long for it: {refusal}") from refusal
        return "no", _sentence(str(refusal).split(": ", 1)[1])
    # States add rounding up: the model's own decoding says how much.
    bound = min(max(3 * own_error(model), TOLERANCE), 1e-4) if runner.facts.mixers else TOLERANCE
    assert error < bound, f"{model_type}: logits differ from plain forwards by {error:.1e} of the largest"
    return "eager" if runner.attention_name == "eager" else "yes", ""


def _sentence(text: str) -> str:
    return text.strip().split("\n")[0].split("; ")[0].replace("|", "/")


def read_table() -> tuple[list[str], dict[str, dict[str, str]]]:
    """The versions of the table, and every row by model type: cells by version, and ``"why not"``."""
    head, *rows = csv.reader(TABLE.read_text().splitlines())
    return head[1:-1], {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def write_column() -> None:
    """Try every type and put the results into this version's column."""
    versions, rows = read_table()
    versions = sorted({*versions, VERSION}, key=lambda version: [int(part) for part in version.split(".")])
    for model_type in MODEL_TYPES:
        cell, reason = outcome(model_type)
        print(model_type, cell, reason, flush=True)
        row = rows.setdefault(model_type, {})
        row[VERSION] = cell
        # One reason per row: the newest version's that has one.
        newest = next((v for v in reversed(versions) if row.get(v) in ("no", "?")), None)
        if newest is None:
            row["why not"] = ""
        elif newest == VERSION:
            row["why not"] = reason if newest == versions[-1] else f"in {VERSION}: {reason}"
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model type", *versions, "why not"], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"model type": model_type} | row for model_type, row in sorted(rows.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    write_column()
