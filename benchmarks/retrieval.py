"""Which look-up finds most in real texts, without a model: ``python -m benchmarks.retrieval file=prompts.jsonl``.

Every drafter is given a prompt, and then the answer that the file has for it, round by round: what it drafts is
compared with the answer, and the answer itself is what is emitted (*teacher forcing*). So the mean acceptance length is
that of a greedy target that would answer exactly so. The file has one JSON object per line, with ``turns`` (or
``prompt``) and ``reference`` (or ``answer``); lines without an answer are left out. The first turn is the prompt.

``suffix, shared`` also sees the answers before, of all categories, in the order of the file.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.options import option, read_options, refuse
from drafters.ngram import NGramDrafter
from drafters.suffix import SuffixDrafter
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.engine.slot_table import SlotTable
from specdec.interfaces import Drafter
from specdec.modeling.loading import load_tokenizer
from specdec.requests import SamplingParams
from specdec.tree import DraftTree
from specdec.types import Committed

DRAFTERS: dict[str, Callable[[], NGramDrafter | SuffixDrafter]] = {
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "suffix, tree": lambda: SuffixDrafter(mode="tree"),
    "suffix, shared": lambda: SuffixDrafter(shared=True),
    "suffix, shared tree": lambda: SuffixDrafter(mode="tree", shared=True),
}


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer."""

    category: str
    prompt: str
    answer: str


def read(path: Path) -> Iterator[Answered]:
    """Yields the lines that have an answer."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt, answer = row.get("prompt") or row.get("turns", [""])[0], row.get("reference") or row.get("answer")
        if isinstance(answer, list):
            answer = "\n".join(str(part) for part in answer if part)
        if prompt and isinstance(answer, str) and answer.strip():
            yield Answered(str(row.get("category", path.stem)), prompt, answer)


def bound(drafter: Drafter, width: int) -> Drafter:
    """Returns a drafter that is ready for one request at a time, whatever the target is."""
    drafter.bind(None, max_batch_size=1, max_length=width)  # pyright: ignore[reportArgumentType]
    return drafter


def replayed(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], vocab: int) -> list[int]:
    """Returns the number of accepted tokens of every round in which an answer is emitted.

    Args:
        drafter: Bound for one slot.
        prompt: At least one token.
        answer: What follows.
        vocab: The number of different tokens.
    """
    table = SlotTable(1, len(prompt) + len(answer), vocab, torch.device("cpu"))
    wanted = SamplingParams(max_new_tokens=len(answer)).seeded(0)
    table.admit(0, prompt, wanted, speculate=True)
    table.prefilled(0, len(prompt) - 1)
    table.start(0)
    drafter.admit(0, prompt, wanted)
    accepted, done = [], 0
    while done < len(answer):
        slots = table.rows(np.zeros(1, dtype=np.int64))
        path = walk(drafter.propose(slots), answer[done:])
        emitted = np.array([answer[done : done + len(path) + 1]])
        counts = np.array([len(path) + 1])
        told = Committed(
            slots=slots.index,
            host_slots=slots.host_index,
            tokens=torch.from_numpy(slots.host_tokens[:, : counts[0]].astype(np.int64)),
            starts=slots.host_lengths.copy(),
            counts=counts,
            next_tokens=torch.from_numpy(emitted[:, -1]),
            path=torch.tensor([path], dtype=torch.long),
            hidden_states={},
            host_path=np.array([path], dtype=np.int64),
            host_emitted=emitted,
        )
        table.advance_host(slots, emitted, counts)
        drafter.observe(told)
        accepted.append(len(path))
        done += len(path) + 1
    drafter.release(0)
    return accepted


def walk(tree: DraftTree, answer: Sequence[int]) -> list[int]:
    """Returns the nodes that go on like the answer, and leaves its last token to the target."""
    nodes = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.valid[0].tolist(), strict=True))
    path, at = [], 0
    for token in answer[:-1]:
        found = [node for node, (above, own, valid) in enumerate(nodes) if valid and above == at and own == token]
        if not found:
            break
        at = found[0]
        path.append(at)
    return path


@dataclass(frozen=True)
class Options:
    """The command line."""

    file: Path = option(Path("prompts.jsonl"), "prompts with answers, one JSON object per line")
    tokenizer: str = option("bundled/target", "whose tokens are counted: a model that ships, a folder, or a hub name")
    count: int = option(0, "prompts of every category at most; 0 for all", least=0)


def main() -> None:
    """Replay all drafters, and print one table."""
    options = read_options(Options, __doc__)
    if not options.file.is_file():
        refuse(ValueError(f"file={options.file}: there is no such file; give JSON Lines of prompts with answers"))
    grouped: dict[str, list[Answered]] = defaultdict(list)
    for each in read(options.file):
        if not options.count or len(grouped[each.category]) < options.count:
            grouped[each.category].append(each)
    if not grouped:
        refuse(ValueError(f"file={options.file}: no line has a prompt and an answer (reference)"))
    tokenizer = load_tokenizer(options.tokenizer)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    texts = {
        category: [(tokens(each.prompt + "\n"), tokens(each.answer)) for each in some]
        for category, some in grouped.items()
    }
    longest = max(len(prompt) + len(answer) for some in texts.values() for prompt, answer in some)
    drafters = {name: bound(make(), longest) for name, make in DRAFTERS.items()}
    columns = (Column("category", "left"), Column("answers"), Column("tokens"), *[Column(name) for name in drafters])
    table = Table(columns, "Mean acceptance length (tokens per round), teacher-forced")
    total = dict.fromkeys(drafters, (0, 0))
    for category, some in texts.items():
        cells = []
        for name, drafter in drafters.items():
            rounds = [
                each
                for prompt, answer in some
                if prompt and answer
                for each in replayed(drafter, prompt, answer, len(tokenizer))
            ]
            emitted = sum(rounds) + len(rounds)
            total[name] = total[name][0] + emitted, total[name][1] + len(rounds)
            cells.append(f"{emitted / len(rounds):.2f}")
        table.add(category, str(len(some)), f"{sum(len(answer) for _, answer in some):,}", *cells)
    every = [pair for some in texts.values() for pair in some]
    cells = [f"{emitted / rounds:.2f}" for emitted, rounds in total.values()]
    table.add("all", str(len(every)), f"{sum(len(answer) for _, answer in every):,}", *cells)
    terminal.console(140).print(terminal.render(table))


if __name__ == "__main__":
    main()
