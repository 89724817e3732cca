"""Conversations, with the parts that the assistant says marked by the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.datasets.files import rows
from experiments.training.data.document import Document, Documents, Source, held_apart, tokenizer_of
from specdec.engine.intake import Message, chat_message
from specdec.origin import first_sentence
from specdec.target.target import Target

Told = tuple[str, list[Message], list[Message]]
"""A conversation: its place in the file, messages, and tools."""
_SILENT = (
    "{} has no assistant turns, so there is nothing to learn from: let the target answer the prompts with "
    "regenerate=target, or give conversations with answers"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat(Source):
    """A conversation per line of a JSONL (or Parquet) file.

    A line holds ``messages`` or ``conversations``: a list of ``{"role": …, "content": …}``, with calls of the ``tools``
    beside it if there are any, or of ShareGPT's ``{"from": "human", "value": …}``; or ``turns``, of which the first is
    asked. What the assistant says is supervised, the token that ends its turn included, as the template's
    ``{% generation %}`` markers have it.

    Args:
        file: A path, or a name on the hub (``experiments.datasets.files``).
        held_out: The share of the conversations that is only measured with.
        template: The path of a chat template (Jinja) to use in place of the tokenizer's; None for that one.
        template_options: More arguments of the template, such as ``{enable_thinking: false}``.
        count: How many conversations to read; None for all.
    """

    def __init__(
        self, file: str, *, held_out: float = 0.02, template: str | None = None,
        template_options: Mapping[str, Any] | None = None, count: int | None = None,
    ):  # fmt: skip
        self.file, self.held_out, self.count = file, held_out, count
        self.template, self.options = template, dict(template_options or {})

    def conversations(self) -> list[Told]:
        """The conversations of the file. Raises ValueError: a line is not a conversation, or there is none."""
        found = []
        for number, row in rows(self.file, "data.file"):
            if self.count is not None and len(found) == self.count:
                break
            if isinstance(row, Mapping) and "made_with" in row:  # the first line of ``regenerate.file``
                continue
            where = f"{self.file}, line {number}"
            found.append((where, *told_in(row, where)))
        if not found:
            raise ValueError(f"{self.file} has no conversations: it is empty")
        return found

    def check(self, *, unanswered: bool = False) -> None:
        """Refuse a file without conversations, and one in which no assistant speaks."""
        if self.template is not None and not Path(self.template).is_file():
            raise ValueError(f"data.template: there is no file {self.template!r}")
        if not (answered_in(self.conversations()) or unanswered):
            raise ValueError(_SILENT.format(self.file))

    def load(self, target: Target, *, unanswered: bool = False) -> Documents:
        """Apply the template to every conversation in which the assistant speaks."""
        tokenizer, told = tokenizer_of(target), self.conversations()
        template = template_of(tokenizer, self.template, answers=answered_in(told))
        documents = []
        for name, messages, tools in told:
            asks = messages[-1]["role"] in ("user", "tool")
            document = marked((name, messages, tools), tokenizer, template, self.options, asks=unanswered and asks)
            if document.supervised.any() or (unanswered and asks):
                documents.append(document)
        if not documents:
            raise ValueError(_SILENT.format(self.file))
        return held_apart(documents, self.held_out)


def told_in(row: Any, where: str) -> tuple[list[Message], list[Message]]:
    """A line's messages and tools; some files have these lists as JSON. Raises ValueError: it is no conversation."""
    row = row if isinstance(row, Mapping) else {}
    given: Any = row.get("messages", row.get("conversations"))
    if given is None and row.get("turns"):  # what is asked, as in our datasets
        given = [{"role": "user", "content": row["turns"][0]}]
    try:
        given, tools = (
            json.loads(each) if isinstance(each, str) else [*each] for each in (given or (), row.get("tools") or ())
        )
    except (TypeError, ValueError):
        given, tools = [], []
    if not given:
        raise ValueError(f'{where} is no conversation: give {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    found: list[Message] = []
    for message in given:
        if isinstance(message, Mapping) and "from" in message:
            roles = {"human": "user", "gpt": "assistant"}
            message = {"role": roles.get(message["from"], message["from"]), "content": message.get("value")}
        found.append(chat_message(message, f"{where}: a message"))
    return found, tools


def answered_in(conversations: Sequence[Told]) -> bool:
    """Whether the assistant speaks in any of them."""
    return any(message["role"] == "assistant" for _, messages, _ in conversations for message in messages)


def template_of(tokenizer: Any, path: str | None, *, answers: bool) -> str:
    """The chat template; with ``answers`` it has to mark what the assistant says, or ValueError says how."""
    template = tokenizer.chat_template if path is None else Path(path).read_text(encoding="utf-8")
    if not isinstance(template, str) or not template:
        raise ValueError("the target's tokenizer has no chat template: give data.template=FILE, or data=text")
    if answers and _GENERATION.search(template) is None:
        raise ValueError(
            "the chat template has no generation markers, so nobody knows which tokens the assistant says: put "
            "{% generation %} and {% endgeneration %} around them in a copy, and give data.template=FILE"
        )
    return template


def marked(told: Told, tokenizer: Any, template: str, options: Mapping[str, Any], *, asks: bool = False) -> Document:
    """A conversation as tokens, supervised where the template marks the assistant's words.

    With ``asks`` it ends where the assistant is to speak. Raises ValueError: the template does not take these messages.
    """
    name, messages, tools = told
    if tools and "tools" not in template:
        raise ValueError(f"{name} has tools, which the chat template does not read: drop them, or give data.template")
    given = {"chat_template": template, "add_generation_prompt": asks, **options, "tools": tools or None}
    try:
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **given
        )
    except Exception as error:  # a template may raise anything
        reason = first_sentence(error) or type(error).__name__
        raise ValueError(f"{name}: the chat template does not take these messages: {reason}") from error
    ids = torch.tensor(found["input_ids"], dtype=torch.int32)
    return Document(name, ids, torch.tensor(found["assistant_masks"], dtype=torch.bool), messages, tools)
