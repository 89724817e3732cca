"""The training text as tokens: the standard library's sources, and the tokenizer trained on them."""

from pathlib import Path

import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from experiments.datasets.sources import read_source, training_files

END_OF_TEXT = "<|endoftext|>"

# Words, numbers and punctuation with the space before them; a line break takes the next line's indentation along.
_PIECES = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|[ \t]+(?=[ \t])|\s+")


def train_tokenizer(out: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on the training files and save it for ``AutoTokenizer``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_source(path) for path in training_files()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False, model_max_length=1024
    )
    fast.save_pretrained(out)


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that ``train_tokenizer`` saved."""
    return PreTrainedTokenizerFast.from_pretrained(path)


def encode(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> Int[Tensor, " position"]:
    """All files as one tensor, with an end-of-text token after each."""
    ids: list[int] = []
    for text in tokenizer([read_source(path) for path in files])["input_ids"]:
        ids += [*text, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.int32)


def interleave(
    first: Int[Tensor, " position"], second: Int[Tensor, " position"], *, length: int
) -> Int[Tensor, " position"]:
    """As much of ``second`` as there is of ``first``, window by window of ``length``."""
    count = min(len(first), len(second)) // length
    return torch.stack(
        [first[: count * length].view(count, length), second[: count * length].view(count, length)], 1
    ).flatten()
