"""Text becomes documents: files, conversations with what the assistant says marked, and the target's own answers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from drafters.model import TrainedLM
from experiments.commands.train import _rewritten
from experiments.training.data.chat import Chat
from experiments.training.data.document import Document, held_apart
from experiments.training.data.packing import Rows, token_counts
from experiments.training.data.plain import TextFiles
from experiments.training.data.regenerate import RegenerateConfig, answered, prompts_of, regenerate, with_originals
from experiments.training.served import ServedConfig, served
from specdec import Engine, SamplingParams, Target
from tests.experiments.conftest import VOCAB_SIZE, byte_tokenizer
from tests.models import tiny_model

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}!{% endgeneration %}"
    "{% else %}U:{{ m['content'] }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
SAID = (("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no"))
TALK = [{"role": role, "content": content} for role, content in SAID]


@pytest.fixture
def chatting() -> Target:
    """A target whose tokenizer has a template with markers."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Target(tiny_model(vocab_size=VOCAB_SIZE), tokenizer, name="tiny")


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(document: Document, *, supervised: bool) -> str:
    return byte_tokenizer().decode(document.tokens[document.supervised == supervised].tolist())


def test_what_the_assistant_says_is_learned(chatting: Target, tmp_path: Path) -> None:
    """The mark that ends its turn included, in both forms of files; a file may take the place of the template."""
    shared = [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in TALK]
    file = lines(tmp_path / "talks.jsonl", {"messages": TALK}, {"conversations": shared})
    found = Chat(file, held_out=0.5).load(chatting)
    for document in (*found.training, *found.held_out):
        assert [said(document, supervised=each) for each in (True, False)] == ["yes!no!", "U:hi;A:U:so;A:"]
        assert byte_tokenizer().decode(document.prompt) == "U:hi;A:"
    (template := tmp_path / "t.jinja").write_text(TEMPLATE.replace("U:", "you "))
    found = Chat(file, template=str(template), held_out=0.5).load(chatting)
    assert said(found.training[0], supervised=False) == "you hi;A:you so;A:"


def test_calls_of_tools_and_content_in_parts_are_as_the_endpoint_reads_them(chatting: Target, tmp_path: Path) -> None:
    """Arguments as JSON or objects, lists as JSON, too; the tools stay beside the target's own answers."""
    content = "{{ m['content'] or m['tool_calls'][0]['function']['arguments']['x'] }}!"
    names = "{{ (tools or [])|map(attribute='function')|map(attribute='name')|join }};"
    chatting.tokenizer.chat_template = names + TEMPLATE.replace("{{ m['content'] }}!", content)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "one"}'}}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    talk = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "2"}, TALK[-1]]
    rows = {"messages": talk, "tools": tools}, {"messages": json.dumps(talk), "tools": json.dumps(tools)}
    found = Chat(lines(tmp_path / "t.jsonl", *rows, rows[0]), held_out=0.3).load(chatting)
    for document in (*found.training, *found.held_out):
        assert [said(document, supervised=each) for each in (True, False)] == ["one!no!", "f;U:hi;A:U:2;A:"]
    made = _rewritten(found, chatting, None, config(tmp_path), 0, Accelerator(cpu=True))
    assert all(document.tools == tools for document in made.training)
    assert [each for *_, each in Chat(str(tmp_path / "answers.jsonl")).conversations()] == [tools] * 2
    chatting.tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="line 1 has tools, which the chat template does not read"):
        Chat(lines(tmp_path / "t.jsonl", *rows)).load(chatting)


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"messages": TALK[:1]}] * 2, TEMPLATE, "has no assistant turns, so there is nothing to learn from"),
        ([{"messages": TALK}] * 2, "{{ messages[0]['content'] }}", "the chat template has no generation markers"),
        ([{"messages": TALK}] * 2, None, "tokenizer has no chat template: give data.template=FILE"),
        ([{"messages": [{"role": "user"}]}], TEMPLATE, r"line 1: a message is \{'role': 'user'\}: give "),
        ([{"messages": "[oops"}], TEMPLATE, "line 1 is no conversation: give"),
    ],
)
def test_bad_conversations_are_one_sentence(rows, template, message: str, chatting: Target, tmp_path: Path) -> None:
    chatting.tokenizer.chat_template = template
    source = Chat(lines(tmp_path / "talks.jsonl", *rows))
    with pytest.raises(ValueError, match=message):
        source.check() or source.load(chatting)


def test_files_are_documents_and_some_are_held_out(tmp_path: Path, chatting: Target) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 5)
    found = TextFiles(f"{tmp_path}/*.txt", held_out=0.3).load(chatting)
    assert [byte_tokenizer().decode(d.tokens.tolist()[1:-1]) for d in found.training] == ["aaaaa", "bbbbb"]
    assert found.training[0].tokens[0] == found.training[0].tokens[-1] == 0, "between two ends of text"
    documents = [Document.whole(str(n), [n, n]) for n in range(10)]
    found = held_apart(documents, 0.2)
    assert [d.name for d in found.held_out] == ["4", "9"] and len(found.training) == 8
    assert len(held_apart(documents[:3], 0.01).held_out) == 1
    for message, call in (
        (r"data\.files: no file is '.*nothing\.\*'", lambda: TextFiles("/nothing.*").check()),
        ("1 document is too few", lambda: held_apart(documents[:1], 0.2)),
        ("held_out=0.6", lambda: held_apart(documents, 0.6)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_rows_are_the_documents_they_are_made_of() -> None:
    documents = [Document.whole(str(n), list(range(n * 100, n * 100 + n))) for n in (3, 40, 5, 9, 1, 16)]
    rows = Rows(documents, length=16, batch_size=1, seed=0)
    batch = rows.batch(list(range(len(rows))))
    inside = batch.documents >= 0
    known = sorted(token for d in documents if len(d.tokens) > 1 for token in d.tokens.tolist())
    assert sorted(batch.tokens[inside].tolist()) == known, "one token teaches nothing"
    follows = (batch.positions > 0)[:, 1:] & inside[:, 1:]
    assert (batch.tokens.diff()[follows] == 1).all() and (batch.positions.diff()[follows] == 1).all()
    assert len(rows) == 5, "75 tokens do not fit into four rows: 16 + 16, 16, 9 + 5, 8 + 3"
    assert token_counts(documents[:1], 304).tolist() == [0] * 300 + [1, 1, 1, 0]


def test_an_epoch_visits_every_row_once_whatever_the_processes() -> None:
    rows = Rows([Document.whole(str(n), [n] * 8) for n in range(12)], length=8, batch_size=4, seed=1)
    assert rows.steps_per_epoch == 3
    epochs = [[rows.numbers(step) for step in range(start, start + 3)] for start in (0, 3)]
    for epoch in epochs:
        assert sorted(number for step in epoch for number in step) == list(range(12))
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    halves = rows.numbers(1, 0, 2), rows.numbers(1, 1, 2)
    assert sorted(halves[0] + halves[1]) == sorted(rows.numbers(1)) and len(halves[0]) == 2


def config(tmp_path: Path, **options: Any) -> RegenerateConfig:
    given = {"prompt_tokens": 4, "max_new_tokens": 6, "batch_size": 2, "greedy": 1.0} | options
    return RegenerateConfig(file=str(tmp_path / "answers.jsonl"), **given)


def test_every_turn_is_answered_by_the_target(chatting: Target, tmp_path: Path) -> None:
    """The second answer follows the first one of the target, not the file's. Nothing stops this target but its length,
    so the conversation ends where an answer is cut off, unless the end comes in time."""
    document = Chat(lines(tmp_path / "t.jsonl", {"messages": TALK}, {"messages": TALK}), held_out=0.5).load(chatting)
    prompt = document.training[0].prompt
    with Engine(chatting, max_length=128) as engine:
        (first,) = engine.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))
        stop = first.token_ids[2]
        chatting.eos_token_ids = frozenset([stop])
        (found,) = answered(document.training, engine, config(tmp_path), seed=0, numbers=[0])
        cut = first.token_ids[: first.token_ids.index(stop) + 1]
        middle = document.training[0].tokens[:-3].tolist()[len(prompt) + 4 :]
        given = [*prompt, *cut, *middle]
        assert found.tokens[: len(given)].tolist() == given
        (second,) = engine.generate([given], SamplingParams(max_new_tokens=6))
    assert found.tokens[len(given) :].tolist() == list(second.token_ids)
    marks = [0] * len(prompt) + [1] * len(cut) + [0] * len(middle) + [1] * len(second.token_ids)
    assert found.supervised.int().tolist() == marks


def test_plain_text_is_continued_and_the_file_is_read_again(chatting: Target, tmp_path: Path) -> None:
    """Cut off in the middle of a line, the file is finished to the same documents; other settings are refused."""
    texts = [Document.whole(name, list(range(n, n + 30))) for n, name in enumerate("abc", start=1)]
    settings = config(tmp_path, documents=5, greedy=0.5)
    prompts = prompts_of(texts, settings, seed=3)
    assert len(prompts) == 5 and all(len(p.tokens) == 4 and not p.supervised.any() for p in prompts)
    with Engine(chatting, max_length=64, max_batch_size=2) as engine:
        made = regenerate(prompts, engine, settings, seed=3, made_with={"target": "tiny"})
        assert [len(d.tokens) for d in made] == [10] * 5
        assert all(d.supervised.int().tolist() == [0] * 4 + [1] * 6 for d in made)
        path = tmp_path / "answers.jsonl"
        whole = path.read_text()
        path.write_text("".join(whole.splitlines(keepends=True)[:3]) + '{"name": "b fr')
        again = regenerate(prompts, engine, settings, seed=3, made_with={"target": "tiny"})
        assert path.read_text() == whole and [d.tokens.tolist() for d in again] == [d.tokens.tolist() for d in made]
        with pytest.raises(ValueError, match="holds responses made with target='tiny', and now it is 'other'"):
            regenerate(prompts, engine, settings, seed=3, made_with={"target": "other"})
    mixed = with_originals(made, texts, 1.0, seed=0)
    assert len(mixed) == 7, "fifty new tokens, and two of the texts of thirty"


def test_unanswered_questions_are_answered(chatting: Target, tmp_path: Path) -> None:
    """Also those that are held out, by a template without markers; the answers are written as conversations, too."""
    file = lines(tmp_path / "t.jsonl", {"messages": TALK[:1]}, {"turns": ["hi", "and then?"]}, {"messages": TALK[:1]})
    assert chatting.tokenizer is not None
    chatting.tokenizer.chat_template = re.sub("{% (end)?generation %}", "", TEMPLATE)  # nobody has answered yet
    found = Chat(file).load(chatting, unanswered=True)
    assert byte_tokenizer().decode(found.training[0].tokens.tolist()) == "U:hi;A:"
    made = _rewritten(found, chatting, None, config(tmp_path), 0, Accelerator(cpu=True))
    assert [len(made.training), len(made.held_out)] == [2, 1]
    for document in (*made.training, *made.held_out):
        assert int(document.supervised.sum()) == 6 and said(document, supervised=False) == "U:hi;A:"
        told = [*TALK[:1], {"role": "assistant", "content": said(document, supervised=True)}]
        assert [*document.messages] == told
    again = Chat(str(tmp_path / "answers.jsonl")).conversations()
    assert [messages for _, messages, _ in again] == [[*d.messages] for d in (*made.training, *made.held_out)]


def test_the_served_length_is_the_engines(target: Target) -> None:
    """A head that is the target itself is accepted to the last token, at every temperature."""
    head: Any = TrainedLM(config={"hidden_size": 8}, depths=3)
    head.head = target.model
    settings = ServedConfig(prompts=2, max_new_tokens=12, temperatures=(0.0, 1.0))
    figures = served(head, target, [[1, 2, 3], [4, 5]], settings, seed=0)
    for name in ("served_length", "served_length/T=0", "served_length/T=1", "expected_length", "expected_length/T=1"):
        assert figures[name] == pytest.approx(4.0)
    assert figures["served_length/T=0/low"] == figures["served_length/T=1/high"] == 4.0, "each prompt has this length"
    assert head.training
