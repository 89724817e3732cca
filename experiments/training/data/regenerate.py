"""Responses by the target itself: what a drafter meets when it runs is not the data's text but the target's own."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from experiments.results.origin import keep_row, kept_rows
from experiments.training.data.document import Document
from specdec.arguments import number, whole
from specdec.engine.engine import Engine
from specdec.engine.intake import Message
from specdec.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Settings of the text that the target writes.

    Attributes:
        file: A JSONL file that takes the responses, document by document. A later training with the same settings reads
            them from there, and one that was interrupted goes on.
        documents: How many documents are made; None for as many as there are prompts.
        prompt_tokens: Tokens at the beginning of a plain text that are its prompt. What follows them is the target's.
        max_new_tokens: Tokens of a response. A conversation ends where a response is cut off.
        greedy: Share of the documents that is decoded greedily, not sampled with what stands above it.
        original: How many tokens of the data's own documents are trained on besides, per token of the new ones.
    """

    file: str
    documents: int | None = None
    prompt_tokens: int = 64
    max_new_tokens: int = 448
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: float = 0.25
    original: float = 0.0
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("documents", "prompt_tokens", "max_new_tokens", "batch_size"):
            if (value := getattr(self, name)) is not None:
                whole(f"regenerate.{name}", value, least=1)
        number("regenerate.greedy", self.greedy, "give a share from 0 to 1", lambda value: 0 <= value <= 1)
        for name in ("temperature", "original"):
            number(f"regenerate.{name}", getattr(self, name), "give a number of at least 0", lambda value: value >= 0)
        SamplingParams(top_k=self.top_k, top_p=self.top_p)  # refuses them before anything is read


def prompts_of(documents: Sequence[Document], config: RegenerateConfig, seed: int) -> list[Document]:
    """The beginnings that the target is to answer or go on with.

    A conversation keeps its form: its supervised parts are what the target writes anew. Plain text, of which everything
    is supervised, becomes prompts of ``prompt_tokens``, from random places.
    """
    plain = [d for d in documents if bool(d.supervised.all())]
    chats = [d for d in documents if not bool(d.supervised.all())]
    generator = torch.Generator().manual_seed(seed)
    found = [chats[i] for i in torch.randperm(len(chats), generator=generator).tolist()][: config.documents]
    if plain:
        sizes = torch.tensor([float(max(0, len(d.tokens) - config.prompt_tokens)) for d in plain])
        length = config.prompt_tokens + config.max_new_tokens
        count = (int(sizes.sum()) // length or 1) if config.documents is None else config.documents - len(found)
        if count > 0 and float(sizes.sum()) > 0:
            for index in torch.multinomial(sizes, count, replacement=True, generator=generator).tolist():
                start = int(torch.randint(int(sizes[index]), (1,), generator=generator))
                tokens = plain[index].tokens[start : start + config.prompt_tokens]
                name = f"{plain[index].name} from token {start}, continued"
                found.append(Document(name, tokens, torch.zeros(len(tokens), dtype=torch.bool)))
    if not found:
        raise ValueError(f"no text is longer than regenerate.prompt_tokens={config.prompt_tokens}: lower it")
    return found


def regenerate(
    prompts: Sequence[Document], engine: Engine, config: RegenerateConfig, *, seed: int, made_with: dict[str, Any],
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[Document]:  # fmt: skip
    """Let the target answer, and return its documents.

    Args:
        engine: The target's, with a drafter or without: the output has the target's distribution either way.
        seed: Seed of the sampling. A document depends on it and on its number, not on what is decoded beside it.
        made_with: What else the responses depend on, such as the target's name, for the file's first line.
        told: Called with the number of finished documents, and of all.

    Raises ValueError: the file holds the responses of other settings.
    """
    path = Path(config.file)
    settings = {name: value for name, value in asdict(config).items() if name not in ("file", "original", "batch_size")}
    header = {"made_with": {**made_with, **settings, "seed": seed, "prompts": len(prompts)}}
    rows = kept_rows(path)
    if not rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_row(path, header)
    for name, now in header["made_with"].items() if rows else ():
        if (before := rows[0].get("made_with", {}).get(name)) != now:
            raise ValueError(
                f"regenerate.file={str(path)!r} holds responses made with {name}={before!r}, and now it is {now!r}: "
                f"give another file, or remove this one"
            )
    done = [_document(**row) for row in rows[1:]]
    while len(done) < len(prompts):
        told(len(done), len(prompts))
        numbers = range(len(done), min(len(done) + config.batch_size, len(prompts)))
        for document in answered([prompts[n] for n in numbers], engine, config, seed=seed, numbers=numbers):
            done.append(document)
            row = {"name": document.name, "tokens": document.tokens.tolist()}
            row |= {"supervised": document.supervised.int().tolist()}
            keep_row(path, row | {key: list(each) for key in ("messages", "tools") if (each := getattr(document, key))})
    told(len(done), len(prompts))
    return done


def _document(name: str, tokens: list[int], supervised: list[int], **told: Sequence[Message]) -> Document:
    ids, marks = torch.tensor(tokens, dtype=torch.int32), torch.tensor(supervised, dtype=torch.bool)
    return Document(name, ids, marks, **told)


def _said(prompt: Document, answers: list[str]) -> list[Message]:
    """A conversation up to the last new answer, whose calls of tools are text."""
    told, left = list[Message](), list(answers)
    for message in [*prompt.messages, {"role": "assistant"}] if prompt.messages else []:
        if message["role"] != "assistant":
            told.append(message)
        elif left:
            told.append({"role": "assistant", "content": left.pop(0)})
        if answers and not left:
            break
    return told


def answered(
    prompts: Sequence[Document], engine: Engine, config: RegenerateConfig, *, seed: int, numbers: Sequence[int]
) -> list[Document]:
    """The documents with every supervised part replaced by what the target says there, turn by turn."""
    given = [_parts(prompt) for prompt in prompts]
    tokens = [list(parts[0]) for parts in given]
    marks = [[0] * len(row) for row in tokens]
    answers: list[list[str]] = [[] for _ in prompts]
    fixed = SamplingParams(max_new_tokens=config.max_new_tokens, seed=seed, top_k=config.top_k, top_p=config.top_p)
    open_rows, turn = list(range(len(prompts))), 0
    while fitting := [row for row in open_rows if len(tokens[row]) + config.max_new_tokens <= engine.max_length]:
        warm = {row: config.temperature * ((numbers[row] * 0.618034) % 1 >= config.greedy) for row in fitting}
        each = [replace(fixed, temperature=warm[row], stream=numbers[row] * 1024 + turn) for row in fitting]
        completions, open_rows = engine.generate([tokens[row] for row in fitting], each), []
        for row, completion in zip(fitting, completions, strict=True):
            if completion.finish_reason == "error":
                continue
            tokens[row] += completion.token_ids
            marks[row] += [1] * len(completion.token_ids)
            answers[row].append(completion.text)
            turns = given[row]
            if completion.finish_reason == "stop" and turn + 1 < len(turns):
                tokens[row] += turns[turn + 1]
                marks[row] += [0] * len(turns[turn + 1])
                open_rows.append(row)
        turn += 1
    made = zip(prompts, tokens, marks, answers, strict=True)
    return [
        _document(prompt.name, ids, mark, messages=_said(prompt, texts), tools=prompt.tools)
        for prompt, ids, mark, texts in made
    ]


def _parts(document: Document) -> list[list[int]]:
    """The runs of tokens that are not supervised, each of which is followed by a response.

    What stands behind the last response is left out; a document without any is one prompt.
    """
    pairs = zip(document.tokens.tolist(), document.supervised.tolist(), strict=True)
    runs = [(supervised, [token for token, _ in run]) for supervised, run in groupby(pairs, itemgetter(1))]
    return [before for (_, before), (answer, _) in pairwise([(0, []), *runs]) if answer] or [document.tokens.tolist()]


def longest(prompts: Sequence[Document], config: RegenerateConfig) -> int:
    """The most tokens that a document may have with all of its responses."""
    return max(sum(map(len, parts)) + len(parts) * config.max_new_tokens for parts in map(_parts, prompts))


def with_originals(made: list[Document], originals: Sequence[Document], share: float, seed: int) -> list[Document]:
    """The new documents, and some of the data's own at random: ``share`` times as many tokens."""
    room, found = share * sum(len(document.tokens) for document in made), list(made)
    order = torch.randperm(len(originals), generator=torch.Generator().manual_seed(seed)).tolist()
    while room > 0 and order:
        found.append(originals[order.pop(0)])
        room -= len(found[-1].tokens)
    return found
