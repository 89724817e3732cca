"""Conversations, with the parts that the assistant says marked by the chat template."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.datasets.files import rows
from experiments.training.data.document import Document, Documents, Source, held_apart, tokenizer_of
from specdec.origin import first_sentence
from specdec.target.target import Target

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat(Source):
    """A conversation per line of a JSONL (or Parquet) file.

    A line holds ``messages`` or ``conversations``: a list of ``{"role": …, "content": …}``, or of ShareGPT's
    ``{"from": "human", "value": …}``; or ``turns``, of which the first is asked. What the assistant says is supervised,
    the token that ends its turn included, as the template's ``{% generation %}`` markers have it.

    Args:
        file: A path, or a name on the hub (``experiments.datasets.files``).
        held_out: The share of the conversations that is only measured with.
        template: The path of a chat template (Jinja) to use in place of the tokenizer's; None for that one.
        template_options: More arguments of the template, such as ``{enable_thinking: false}``.
        count: How many conversations to read; None for all.
    """

    def __init__(
        self,
        file: str,
        *,
        held_out: float = 0.02,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        count: int | None = None,
    ):
        self.file, self.held_out, self.count = file, held_out, count
        self.template, self.options = template, dict(template_options or {})

    def conversations(self) -> list[tuple[str, list[dict[str, str]]]]:
        """The conversations, each with its place in the file.

        Raises:
            ValueError: A line is not a conversation, or there is none.
        """
        found = []
        for number, row in rows(self.file, "data.file"):
            if self.count is not None and len(found) == self.count:
                break
            if isinstance(row, Mapping) and "made_with" in row:  # the first line of ``regenerate.file``
                continue
            found.append((f"{self.file}, line {number}", messages_of(row, f"{self.file}, line {number}")))
        if not found:
            raise ValueError(f"{self.file} has no conversations: it is empty")
        return found

    def check(self, *, unanswered: bool = False) -> None:
        """Refuse a file without conversations, and one in which no assistant speaks."""
        if self.template is not None and not Path(self.template).is_file():
            raise ValueError(f"data.template: there is no file {self.template!r}")
        told = self.conversations()
        if not unanswered and not answered_in(told):
            raise ValueError(no_turns(self.file))

    def load(self, target: Target, *, unanswered: bool = False) -> Documents:
        """Apply the template to every conversation in which the assistant speaks."""
        tokenizer, told = tokenizer_of(target), self.conversations()
        template = template_of(tokenizer, self.template, answers=answered_in(told))
        documents = []
        for name, messages in told:
            asks = messages[-1]["role"] == "user"
            document = marked(name, messages, tokenizer, template, self.options, asks=unanswered and asks)
            if document.supervised.any() or (unanswered and asks):
                documents.append(document)
        if not documents:
            raise ValueError(no_turns(self.file))
        return held_apart(documents, self.held_out)


def messages_of(row: Any, where: str) -> list[dict[str, str]]:
    """A line's messages. Raises ValueError: it has none, in neither of the two forms."""
    given = row.get("messages", row.get("conversations")) if isinstance(row, Mapping) else None
    if isinstance(row, Mapping) and given is None and row.get("turns"):  # what is asked, as in our datasets
        given = [{"role": "user", "content": row["turns"][0]}]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f'{where} is no conversation: give {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    found = []
    for message in given:
        if isinstance(message, Mapping) and "from" in message:
            roles = {"human": "user", "gpt": "assistant"}
            message = {"role": roles.get(message["from"], message["from"]), "content": message.get("value")}
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f'{where}: a message is {{"role": "user" or "assistant", "content": "text"}}')
        found.append({"role": message["role"], "content": message["content"]})
    return found


def answered_in(conversations: Sequence[tuple[str, list[dict[str, str]]]]) -> bool:
    """Whether the assistant speaks in any of them."""
    return any(message["role"] == "assistant" for _, messages in conversations for message in messages)


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


def marked(
    name: str,
    messages: list[dict[str, str]],
    tokenizer: Any,
    template: str,
    options: Mapping[str, Any],
    *,
    asks: bool = False,
) -> Document:
    """A conversation as tokens, supervised where the template marks the assistant's words.

    With ``asks`` it ends where the assistant is to speak.

    Raises:
        ValueError: The template does not take these messages.
    """
    try:
        found = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            add_generation_prompt=asks,
            **options,
        )
    except Exception as error:  # a template may raise anything
        reason = first_sentence(error) or type(error).__name__
        raise ValueError(f"{name}: the chat template does not take these messages: {reason}") from error
    ids = torch.tensor(found["input_ids"], dtype=torch.int32)
    return Document(name, ids, torch.tensor(found["assistant_masks"], dtype=torch.bool), messages)


def no_turns(file: str) -> str:
    """The sentence about a file in which no assistant speaks."""
    return (
        f"{file} has no assistant turns, so there is nothing to learn from: let the target answer the prompts with "
        f"regenerate=target, or give conversations with answers"
    )
