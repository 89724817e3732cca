"""What tokens spell, which of them two tokenizers have in common, and a text that goes from one to the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.target.spelling import Retokenized, Spelling, split, token_bytes
from tests.experiments.conftest import END_OF_TEXT, byte_tokenizer
from tests.specdec.test_text import CORPUS, byte_level, sentencepiece_style

TOKENIZERS = {"byte-level": byte_level(), "bytes": byte_tokenizer(), "sentencepiece": sentencepiece_style()}
SPELLINGS = {name: Spelling(tokenizer, 400) for name, tokenizer in TOKENIZERS.items()}


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece: a sign for a space, which the decoder drops at the beginning, and tokens of single bytes."""
    words = ["<unk>", "▁a", "▁the", "b", "<0xE2>", "<0x86>", "<0x92>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_token_keeps_the_space_that_a_text_would_drop() -> None:
    tokenizer = spaced_tokenizer()
    assert token_bytes(range(7), tokenizer) == {
        0: b"<unk>", 1: b" a", 2: b" the", 3: b"b", 4: b"\xe2", 5: b"\x86", 6: b"\x92",
    }  # fmt: skip


def test_common_tokens_spell_the_same() -> None:
    """Not by their names: "Ġthe" and "▁the" are one token, and a byte is one whatever it is called."""
    own, other = SPELLINGS["byte-level"], SPELLINGS["sentencepiece"]
    pairs = own.common(other)
    assert [pair[::-1] for pair in sorted(pairs, key=lambda pair: pair[1])] == other.common(own)
    assert pairs == sorted(pairs) and len({right for _, right in pairs}) == len(pairs)
    assert all(own.bytes[left] == other.bytes[right] != b"" for left, right in pairs)
    texts = {own.bytes[left] for left, _ in pairs}
    assert texts == set(own.bytes) & set(other.bytes) - {b""} and b" a" in texts
    names = [TOKENIZERS["sentencepiece"].convert_ids_to_tokens(right) for _, right in pairs]
    assert {"▁", "a", "▁a", "<0xE3>"} <= set(names) and not {"<0x61>", "<0x20>"} & set(names), "no byte for a letter"
    special = {own.special["<end>"], own.special["<turn>"]}
    assert not special & {left for left, _ in pairs} and all(own.bytes[token] == b"" for token in special)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_the_tokens_that_its_tokenizer_gives_it(name: str) -> None:
    tokenizer, spelling = TOKENIZERS[name], SPELLINGS[name]
    for text in (*CORPUS, "a\n\n   b\tc  ", "日本語 🙂"):
        expected = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert spelling.of(split(text.encode()), begins=True) == expected
        spelled = b"".join(spelling.bytes[token] for token in expected)
        assert spelled == text.encode() or name == "sentencepiece"  # which has no token for a tab


def test_special_tokens_keep_their_names() -> None:
    """The beginning that a tokenizer gives its texts stands once, and a special token that only one has is nothing."""
    own, source = byte_tokenizer(), TOKENIZERS["byte-level"]
    own.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    begin, turn, end = own.convert_tokens_to_ids([END_OF_TEXT, "<turn>", "<end>"])
    own.backend_tokenizer.post_processor = processors.TemplateProcessing("<turn> $A", special_tokens=[("<turn>", turn)])
    theirs = source.convert_tokens_to_ids(["<turn>", "<end>"])
    sequence = [theirs[0], *source("hello there")["input_ids"], theirs[1], *source(" you")["input_ids"]]
    words = [list(own(text, add_special_tokens=False)["input_ids"]) for text in ("hello there", " you")]
    wanted = [turn, *words[0], end, *words[1]]
    assert Retokenized(SPELLINGS["byte-level"], Spelling(own, 400)).read(sequence) == wanted
    assert Retokenized(SPELLINGS["byte-level"], Spelling(own, 400)).read(sequence[1:]) == wanted
    back = [begin, *wanted]
    assert Retokenized(Spelling(own, 400), SPELLINGS["byte-level"]).read(back) == sequence


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_text_that_grows_is_read_as_one_that_is_there(data: st.DataObject) -> None:
    """Bytes that are no text, characters in pieces and special tokens included."""
    names = data.draw(st.permutations(sorted(SPELLINGS)))[:2]
    source, own = (SPELLINGS[name] for name in names)
    sequence = data.draw(st.lists(st.integers(0, len(TOKENIZERS[names[0]]) - 1), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=4)))
    growing, found = Retokenized(source, own), list[int]()
    for cut in (*cuts, len(sequence)):
        found = growing.read(sequence[:cut])
    assert found == Retokenized(source, own).read(sequence)
    spelled = b"".join(own.bytes[token] for token in found)
    assert spelled.endswith(growing.tail)
    if names[1] != "sentencepiece":
        assert spelled == b"".join(source.bytes[token] for token in sequence)
