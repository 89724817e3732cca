"""What a prompt may be, and its tokens."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Number
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdec.arguments import kind_of, shown, whole
from specdec.engine.text import encode_prompt
from specdec.origin import first_sentence

Message = Mapping[str, Any]
"""What one side says in a conversation: ``{"role": "user", "content": "Hello"}``."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages. Token ids may be an array or a tensor of one dimension, too."""

_ONE = "give a text, a list of token ids or a list of chat messages"


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns the prompts of a call as a list. A single prompt may stand alone: a text, token ids, chat messages."""
    if isinstance(prompts, str):
        return [prompts]
    several = _listed("prompts", prompts, f"{_ONE}; or several of these in a list")
    single = several and (_all(several, Number) or _all(several, Mapping))
    return [several] if single else several


def encode(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> list[int]:
    """Returns a prompt's tokens.

    Args:
        tokenizer: The target's; None for a target without one, which takes token ids alone.
        prompt: Text gets the special tokens that the tokenizer adds; chat messages those that its template writes.

    Raises:
        ValueError: It is no prompt, or has no tokens, or the tokenizer or its chat template is missing.
    """
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt)
    parts = _listed("the prompt", prompt, _ONE)
    if not parts:
        raise ValueError("the prompt is empty: give at least one token")
    if _all(parts, Mapping):
        return encode_chat(tokenizer, parts)
    if any(isinstance(part, str | bytes | Sequence | Mapping | np.ndarray) for part in parts):
        raise ValueError(f"the prompt is a list with {kind_of(parts[0])} in it: {_ONE}")
    if all(type(part) is int for part in parts):  # thousands of them, as a rule
        return parts
    return [whole("token id", part, remedy="give whole numbers as token ids") for part in parts]


def encode_chat(tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message]) -> list[int]:
    """Returns a conversation's tokens by the tokenizer's chat template, up to where the assistant speaks next.

    If the last message is the assistant's, the output goes on with it.

    Raises:
        ValueError: There is no tokenizer or template, or a message is not one.
    """
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"chat message {number} is {shown(dict(message))}: give {{'role': 'user', 'content': 'text'}}"
                )
    if tokenizer is None:
        raise ValueError("chat messages need a tokenizer: give the Target one, or pass token ids")
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template, so chat messages cannot become a prompt: "
            "give text, or set tokenizer.chat_template"
        )
    goes_on = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )
    except Exception as error:  # a template may raise anything, and often it says which roles it takes
        reason = first_sentence(error) or type(error).__name__
        raise ValueError(f"the target's chat template does not take these messages: {reason}") from error
    ids = tokenizer(str(text), add_special_tokens=False)["input_ids"]  # the template has written the special ones
    if not ids:
        raise ValueError("the chat template made an empty prompt of these messages: give text")
    return list(ids)


def _listed(what: str, given: Any, wanted: str) -> list[Any]:
    """Returns what stands in a list, an array or the like; refuses anything else."""
    given = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if isinstance(given, bytes | Mapping | AbstractSet) or not isinstance(given, Iterable):
        raise ValueError(_misuse(what, given, wanted))
    return list(given)


def _all(parts: Sequence[object], kind: type) -> bool:
    return all(isinstance(part, kind) for part in parts)


def _misuse(what: str, given: object, wanted: str) -> str:
    """Returns why something is no prompt, and what to give."""
    if isinstance(given, Mapping) and "input_ids" in given:
        return f"{what} is what a tokenizer returns: give its input_ids"
    if isinstance(given, Mapping) and "role" in given:
        return f"{what} is a single chat message: give a list of messages"
    if isinstance(given, bytes):
        return f"{what} is bytes: give text or token ids, prompt.decode() or list(prompt)"
    return f"{what} is {kind_of(given)}: {wanted}"
