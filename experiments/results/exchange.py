"""Acceptance in the files of other projects: written from runs, and read where others have published theirs.

* ``vllm``: a line per response with ``metrics.speculative_decoding``, as a server started with
  ``--per-request-spec-decode-metrics detailed`` returns it (vLLM pull request 48915).
* ``inferencex``: InferenceX's golden curves, YAML of model, mode and mean acceptance length by
  ``num_speculative_tokens`` (SemiAnalysisAI/InferenceX, ``golden_al_distribution``).
* ``spec_bench``: Spec-Bench's answers, JSON Lines (hemingkx/Spec-Bench, ``evaluation/eval.py``).

All three count as this project does: the mean acceptance length is emitted tokens per round, the target's own token
included, over all rounds. TensorRT-LLM's ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`` is one less.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.results.records import PLAIN, Record

FORMATS = ("vllm", "inferencex", "spec_bench")


@dataclass(frozen=True)
class Published:
    """A mean acceptance length that somebody has published.

    Attributes:
        file: Where it stands.
        name: Of what: a model, with its mode or category.
        drafted: Drafted tokens per round; None if the file does not say.
        length: Emitted tokens per round.
        rounds: Rounds that it is the mean of; None if the file does not say.
        temperature, category: Of the requests; None if the file does not say.
    """

    file: str
    name: str
    drafted: int | None
    length: float
    rounds: int | None = None
    temperature: float | None = None
    category: str | None = None


def drafted_of(records: Iterable[Record]) -> int:
    """Return the depth that most rounds of some records have drafted."""
    depths = Counter(depth for record in records for depth in record.proposed_depth)
    return max(depths, key=lambda depth: (depths[depth], depth), default=0)


def exported(format: str, records: Sequence[Record], target: str, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of files in a format, by their names.

    Args:
        format: One of ``FORMATS``.
        records: Those of one run.
        target: The target's name.
        about: Sentences for the head of a curve, such as what was decoded.
    """
    groups: Mapping[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        if record.method != PLAIN and record.accepted and not record.failed:
            groups[record.method, record.temperature].append(record)
    # An engine that decodes plainly has no acceptance.
    groups = {key: found for key, found in groups.items() if any(sum(record.accepted) for record in found)}
    if format == "inferencex":
        return {"acceptance.yaml": _curve(groups, target, about)} if groups else {}
    line = _response if format == "vllm" else _answer
    return {
        f"{format}_{method}_T{temperature:g}.jsonl": "".join(
            json.dumps(line(record, target), ensure_ascii=False) + "\n" for record in found
        )
        for (method, temperature), found in groups.items()
    }


def _response(record: Record, target: str) -> dict[str, Any]:
    """A response of vLLM's server. Drafted tokens of a tree are its nodes: then the rate is lower than a chain's."""
    histogram = Counter(record.accepted)
    drafted = sum(record.proposed_nodes)
    figures = {
        "mean_acceptance_length": record.mean_acceptance_length,
        "draft_acceptance_rate": sum(record.accepted) / drafted if drafted else 0.0,
        "acceptance_histogram": [histogram[n] for n in range(max(drafted_of([record]), *record.accepted) + 1)],
        "num_spec_steps": len(record.accepted),
        "num_accepted_draft_tokens": sum(record.accepted),
        "num_draft_tokens": drafted,
        "num_spec_tokens": drafted_of([record]),
        "per_step_accepted": list(record.accepted),
        "per_step_drafted": list(record.proposed_nodes),
    }
    usage = {"prompt_tokens": record.prompt_tokens, "completion_tokens": len(record.token_ids)}
    usage["total_tokens"] = sum(usage.values())
    return {
        "id": f"{record.prompt}-{record.turn}-{record.sample}",
        "object": "text_completion",
        "model": target,
        "choices": [{"index": 0, "text": record.text, "finish_reason": record.finish_reason}],
        "usage": usage,
        "metrics": {"speculative_decoding": figures},
    }


def _answer(record: Record, target: str) -> dict[str, Any]:
    """A line of Spec-Bench's answers, whose lengths count the target's own token."""
    choice = {
        "index": record.sample,
        "turns": [record.text],
        "decoding_steps": [len(record.accepted)],
        "new_tokens": [len(record.token_ids)],
        "wall_time": [record.seconds],
        "accept_lengths": [accepted + 1 for accepted in record.accepted],
    }
    name = f"{target}-{record.method}-temperature-{record.temperature:g}"
    return {"question_id": record.prompt, "category": record.category, "model_id": name, "choices": [choice]}


def _curve(groups: Mapping[tuple[str, float], Sequence[Record]], target: str, about: Mapping[str, Any]) -> str:
    """A golden curve: a mode for every method and temperature, as there is no thinking mode to name."""
    lines = [f"# {name}: {value}" for name, value in about.items()]
    lines += ["# key = num_speculative_tokens; value = emitted tokens per round, the target's own included"]
    lines += [f"{Path(target).name}:"]
    for (method, temperature), found in groups.items():
        if not drafted_of(found):  # another engine, which does not say
            continue
        accepted = [each for record in found for each in record.accepted]
        lines.append(f"  {method}_T{temperature:g}:")
        lines.append(f"    {drafted_of(found)}: {1 + sum(accepted) / len(accepted):.2f}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- Reading


def published(file: str) -> list[Published]:
    """Read what a file says about acceptance, in any of the formats.

    Raises:
        ValueError: There is no such file, or it is in none of the formats.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"published={file}: there is no such file; give a curve (YAML) or responses (JSON Lines)")
    text = path.read_text(encoding="utf-8")
    found = _of_curve(file, text) if path.suffix in (".yaml", ".yml") else _of_lines(file, text)
    if not found:
        raise ValueError(
            f"published={file} has no acceptance in a form that is known: give InferenceX's YAML "
            "(model: mode: number of drafted tokens: length), or JSON Lines of vLLM's responses with "
            "metrics.speculative_decoding, or of Spec-Bench's answers with accept_lengths"
        )
    return found


def _of_curve(file: str, text: str) -> list[Published]:
    try:
        models = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"published={file} is no YAML: {str(error).splitlines()[0]}") from error
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    temperature = re.search(r"temperature:?\s*=?\s*([\d.]+)", comments)
    category = re.search(r'(?:dataset|"CATEGORY"):?\s*"?(\w+)', comments)
    return [
        Published(
            file,
            f"{model}, {mode}",
            int(drafted),
            float(length),
            temperature=float(temperature[1].rstrip(".")) if temperature else None,
            category=category[1] if category else None,
        )
        for model, modes in (models.items() if isinstance(models, dict) else ())
        for mode, curve in (modes.items() if isinstance(modes, dict) else ())
        for drafted, length in (curve.items() if isinstance(curve, dict) else ())
        if str(drafted).isdigit() and isinstance(length, (int, float))
    ]


def _of_lines(file: str, text: str) -> list[Published]:
    """One figure for every model, category and number of drafted tokens."""
    sums: dict[tuple[str, int | None, str | None], list[int]] = defaultdict(lambda: [0, 0])  # accepted, rounds
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"published={file}, line {number} is no JSON") from error
        try:
            row = row.get("data", row)
            told = (row.get("metrics") or {}).get("speculative_decoding")
            if told:
                key = row.get("model", Path(file).stem), told.get("num_spec_tokens"), None
                sums[key][0] += told["num_accepted_draft_tokens"]
                sums[key][1] += told["num_spec_steps"]
            for choice in row.get("choices") or ():
                lengths = choice.get("accept_lengths") or ()
                key = row.get("model_id", Path(file).stem), None, row.get("category")
                sums[key][0] += sum(lengths) - len(lengths)
                sums[key][1] += len(lengths)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"published={file}, line {number} has another form than others of its kind") from error
    return [
        Published(file, model, drafted, 1 + accepted / rounds, rounds, category=category)
        for (model, drafted, category), (accepted, rounds) in sums.items()
        if rounds
    ]
