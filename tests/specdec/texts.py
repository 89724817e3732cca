"""Tokenizers whose tokens end inside characters, and their text in pieces."""

import functools

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec.engine.text import Detokenizer

CORPUS = [
    "Hello world, hello there! The naïve café served crème brûlée.",
    "Grüße aus Köln 🙂🙂 🎉 日本語のテキスト and more words, more text.\n\tindented = [1, 2, 3]\n",
]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (as GPT-2's) in which tokens end inside characters, and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<turn>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


@functools.cache
def sentencepiece_style() -> PreTrainedTokenizerFast:
    """Pieces that carry the space before them, and byte tokens for all other characters (as Llama-2's)."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "▁a", "▁the", "▁world", "▁▁", "hello"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


def pieces_of(*pieces: str) -> list[int]:
    """Ids of sentencepiece-style pieces; what is none is spelled in byte tokens."""
    tokenizer = sentencepiece_style()
    vocab = tokenizer.get_vocab()
    ids: list[int] = []
    for piece in pieces:
        ids += [vocab[piece]] if piece in vocab else [vocab[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def byte_ids(data: bytes) -> list[int]:
    """A byte-level token per byte."""
    vocab = byte_level().get_vocab()
    # The letters of byte-level tokenizers: printable Latin-1 is itself, the other bytes follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [vocab[chr(byte if byte in printable else 256 + others.index(byte))] for byte in data]


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pushes(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Push in rounds of these sizes (repeated as needed), then flush."""
    texts, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[position : position + size]))
        position, turn = position + size, turn + 1
    return [*texts, detokenizer.flush()]


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
