"""Acceptance in the files of other projects: written from runs, and read where others have published theirs.

* ``vllm``: a line per response with ``metrics.speculative_decoding``, as a server started with
  ``--per-request-spec-decode-metrics detailed`` returns it (vLLM pull request 48915).
* ``inferencex``: InferenceX's golden curves, YAML of model, mode and mean acceptance length by
  ``num_speculative_tokens`` (SemiAnalysisAI/InferenceX, ``golden_al_distribution/README.md``).
* ``spec_bench``: Spec-Bench's answers, JSON Lines (hemingkx/Spec-Bench, ``evaluation/eval.py``): a line per question,
  whose turns are in one choice.

All three count the target's own token, as this project does: a length is at least 1 and at most one more than the
number of drafted tokens. The first two leave out rounds without a draft. Elsewhere numbers are off by one:
TensorRT-LLM's ``TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`` is one less than the length, and SGLang's
``--speculative-num-draft-tokens`` counts the root.
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
        name: The model, with its mode or category.
        drafted: Drafted tokens per round; None if the file does not say.
        length: Emitted tokens per round.
        rounds: Rounds that it is the mean of; None if the file does not say.
        temperature, category: The requests' own, several categories with commas; None if the file does not say.
        every_round: Rounds without a draft count, too.
    """

    file: str
    name: str
    drafted: int | None
    length: float
    rounds: int | None = None
    temperature: float | None = None
    category: str | None = None
    every_round: bool = False


def drafted_of(records: Iterable[Record]) -> int:
    """Return the depth of most drafts of some records; 0 if there is none."""
    depths = Counter(depth for record in records for depth in record.proposed_depth if depth)
    return max(depths, key=lambda depth: (depths[depth], depth), default=0)


def exported(format: str, records: Sequence[Record], target: str) -> dict[str, str]:
    """Return the texts of files with a line per response or question, by their names.

    Args:
        format: ``vllm`` or ``spec_bench``.
        records: Those of one run.
        target: The target's name.
    """
    lines = _responses if format == "vllm" else _answers
    return {
        f"{format}_{method}_T{temperature:g}.jsonl": "".join(
            json.dumps(line, ensure_ascii=False) + "\n" for line in lines(found, target)
        )
        for (method, temperature), found in _groups(records).items()
    }


def _groups(records: Iterable[Record]) -> Mapping[tuple[str, float], list[Record]]:
    """Records with rounds by method and temperature; an engine that decodes plainly drafts and accepts nothing."""
    groups: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        if record.method != PLAIN and record.accepted and not record.failed:
            groups[record.method, record.temperature].append(record)
    return {key: found for key, found in groups.items() if any(any(r.accepted + r.proposed_depth) for r in found)}


def _drafts(records: Iterable[Record]) -> list[tuple[int, int]]:
    """Depth and accepted tokens of all rounds with a draft."""
    rounds = [pair for record in records for pair in zip(record.proposed_depth, record.accepted, strict=True)]
    return [(depth, accepted) for depth, accepted in rounds if depth]


def _responses(records: Sequence[Record], target: str) -> list[dict[str, Any]]:
    drafted = drafted_of(records)
    return [_response(record, target, drafted) for record in records]


def _response(record: Record, target: str, drafted: int) -> dict[str, Any]:
    """A response of vLLM's server that drafts so many tokens. A tree counts as its depth."""
    drafts = _drafts([record])
    depths, accepted = [depth for depth, _ in drafts], [taken for _, taken in drafts]
    histogram = Counter(accepted)
    figures = {
        "mean_acceptance_length": 1 + sum(accepted) / len(drafts) if drafts else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(depths) if drafts else 0.0,
        "acceptance_histogram": [histogram[n] for n in range(max([drafted, *accepted]) + 1)],
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(depths),
        "num_spec_tokens": drafted,
        "per_step_accepted": accepted,
        "per_step_drafted": depths,
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


def _answers(records: Sequence[Record], target: str) -> list[dict[str, Any]]:
    """Lines of Spec-Bench's answers, whose lengths count the target's own token."""
    lines: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda each: (each.sample, each.turn)):
        name = f"{target}-{record.method}-temperature-{record.temperature:g}"
        head = {"question_id": record.prompt, "category": record.category, "model_id": name, "choices": []}
        choices = lines.setdefault(record.prompt, head)["choices"]
        if not choices or choices[-1]["index"] != record.sample:
            turns = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
            choices.append({"index": record.sample} | {name: [] for name in turns})
        choice = choices[-1]
        choice["turns"].append(record.text)
        choice["decoding_steps"].append(len(record.accepted))
        choice["new_tokens"].append(len(record.token_ids))
        choice["wall_time"].append(record.seconds)
        choice["accept_lengths"] += [accepted + 1 for accepted in record.accepted]
    return list(lines.values())


def curve(runs: Mapping[str, tuple[str, Sequence[Record]]], about: Mapping[str, Any]) -> str:
    """Return runs as one golden curve: a mode for every method and temperature, as there is no thinking mode to name.

    Empty if no run knows its rounds.

    Args:
        runs: The target's name and the records of each run, by the run's name. Where two runs have the same mode with
            as many drafted tokens, the later one's mode is called after the run, too.
        about: Sentences for the head, such as what was decoded.
    """
    models: dict[str, dict[str, dict[int, float]]] = {}
    for run, (target, records) in runs.items():
        modes = models.setdefault(Path(target).name, {})
        for (method, temperature), found in _groups(records).items():
            drafted, drafts = drafted_of(found), _drafts(found)
            if not drafted:  # another engine, which does not say
                continue
            mode = f"{method}_T{temperature:g}"
            if drafted in modes.get(mode, {}):
                mode = f"{run}_{mode}"
            length = 1 + sum(accepted for _, accepted in drafts) / len(drafts)
            modes.setdefault(mode, {})[drafted] = round(length, 2)
    key = "key = num_speculative_tokens; value = emitted tokens per round with a draft, the target's own included"
    lines = [*(f"# {name}: {value}" for name, value in about.items()), f"# {key}"]
    models = {model: modes for model, modes in models.items() if modes}
    for model, modes in models.items():
        lines += [f"{json.dumps(model)}:"]
        for mode, points in modes.items():
            lines += [f"  {json.dumps(mode)}:", *(f"    {drafted}: {points[drafted]}" for drafted in sorted(points))]
    return "\n".join(lines) + "\n" if models else ""


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
    temperature = re.search(r"temperature\W{1,4}([\d.]+)(?![\d.,])", comments)
    category = re.search(r'(?:dataset|"CATEGORY"):?\s*"?(\w+)', comments)
    return [
        Published(
            file,
            f"{model}, {mode}",
            int(drafted),
            float(length),
            temperature=_number(re.search(r"_T([\d.]+)$", str(mode)) or temperature),
            category=category[1] if category else None,
        )
        for model, modes in (models.items() if isinstance(models, dict) else ())
        for mode, points in (modes.items() if isinstance(modes, dict) else ())
        for drafted, length in (points.items() if isinstance(points, dict) else ())
        if str(drafted).isdigit() and isinstance(length, (int, float))
    ]


def _number(found: re.Match[str] | None) -> float | None:
    return float(found[1].rstrip(".")) if found else None


def _of_lines(file: str, text: str) -> list[Published]:
    """One figure for every model and number of drafted tokens."""
    sums: dict[tuple[str, int | None], list[int]] = defaultdict(lambda: [0, 0])  # accepted, rounds
    categories: dict[str, set[str]] = defaultdict(set)
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"published={file}, line {number} is no JSON") from error
        try:
            row = row.get("data", row)
            told = (row.get("metrics") or {}).get("speculative_decoding")
            if told:
                key = row.get("model", Path(file).stem), told.get("num_spec_tokens")
                sums[key][0] += told["num_accepted_draft_tokens"]
                sums[key][1] += told["num_spec_steps"]
            for choice in row.get("choices") or ():
                lengths = choice.get("accept_lengths") or ()
                key = row.get("model_id", Path(file).stem), None
                categories[key[0]].add(str(row.get("category") or ""))
                sums[key][0] += sum(lengths) - len(lengths)
                sums[key][1] += len(lengths)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"published={file}, line {number} has another form than others of its kind") from error
    return [
        Published(
            file,
            model,
            drafted,
            1 + accepted / rounds,
            rounds,
            temperature=_number(re.search(r"-temp(?:erature)?-([\d.]+)", model)),
            category=", ".join(sorted(categories[model])) if drafted is None else None,
            every_round=drafted is None,
        )
        for (model, drafted), (accepted, rounds) in sums.items()
        if rounds
    ]
