"""Text in pieces: nothing is split, lost or said too early, stop strings cut at the right token; what tokens spell."""

import copy
import functools
from itertools import chain, cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec import SamplingParams, Target
from specdec.engine.intake import Intake
from specdec.engine.text import Detokenizer, encode_prompt
from specdec.target.spelling import Retokenized, Spelling, split
from tests.experiments.conftest import END_OF_TEXT, byte_tokenizer
from tests.models import tiny_model

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
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False)
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
    vocab, letters = byte_level().get_vocab(), bytes_to_unicode()
    return [vocab[letters[byte]] for byte in data]


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pushes(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Push in rounds of these sizes (repeated as needed), then flush."""
    left, turns, texts = iter(ids), cycle(sizes), list[str]()
    while now := list(islice(left, next(turns))):
        texts.append(detokenizer.push(now))
    return [*texts, detokenizer.flush()]


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("prompt", "output", "size", "pieces"),
    [
        (b"x", "🙂é".encode(), 1, ["", "", "", "🙂", "", "é", ""]),
        (b"x", "yes é".encode(), 5, ["yes ", "é", ""]),  # what stands before an incomplete character is not held
        (b"x", "a🙂".encode()[:-1], 4, ["a", "\ufffd"]),  # an output that ends inside a character
        ("x🙂".encode()[:3], "x🙂y".encode()[3:], 9, ["🙂y", ""]),  # a prompt that ends inside a character
    ],
)
def test_a_character_is_not_split_over_tokens(prompt: bytes, output: bytes, size: int, pieces: list[str]) -> None:
    assert pushes(Detokenizer(byte_level(), byte_ids(prompt)), byte_ids(output), [size]) == pieces


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_tokens_make_up_the_decoded_text(data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        tokenizer, prompt_ids = byte_level(), byte_level()("A prompt, é")["input_ids"]
        tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=60)
        ids = data.draw(tokens | st.text(max_size=40).map(lambda text: byte_ids(text.encode())))
    else:
        tokenizer = sentencepiece_style()
        piece = st.sampled_from(["▁", "▁▁", "▁a", "▁the", "hello", "é", "b", ".", "<s>", "\n", "日", "🙂", "日本"])
        prompt_ids = pieces_of("▁a", *data.draw(st.lists(piece, max_size=20)))
        ids = pieces_of(*data.draw(st.lists(piece, max_size=60)))
    stop = data.draw(st.sampled_from([(), ("\0never",)]))
    pieces = pushes(Detokenizer(tokenizer, prompt_ids, stop=stop), ids, data.draw(sizes))
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len(decode(tokenizer, prompt_ids)) :]


def test_what_may_be_a_stop_string_is_held_and_ends_of_prompts_and_outputs() -> None:
    for text, size, pieces in (
        ("ab END cd", 1, ["a", "b", " ", "", "", "", "", "", "", ""]),
        ("ab END cd", 4, ["ab ", "", "", ""]),  # over two rounds
        ("aENb", 1, ["a", "", "", "ENb", ""]),  # its beginning is held and given back
    ):
        detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("END",))
        assert pushes(detokenizer, byte_ids(text.encode()), [size]) == pieces
    # A stop string within a token.
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("orl",))
    ids = byte_level()("Hello world, hello")["input_ids"]
    assert "".join(pushes(detokenizer, ids, [2])) == "Hello w"
    assert decode(byte_level(), ids[: detokenizer.stopped_at]).startswith("Hello worl")
    assert "orl" not in decode(byte_level(), ids[: detokenizer.stopped_at - 1])
    # The prompt's text is no part of a stop string.
    assert Detokenizer(byte_level(), byte_ids(b"xEN"), stop=("END",)).push(byte_ids(b"D.")) == "D."
    # A space after more special tokens than the window is long.
    ids = pieces_of("▁world", *["<s>"] * 60, "▁the")
    assert "".join(pushes(Detokenizer(sentencepiece_style(), pieces_of("hello")), ids, [1])) == " world the"


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_stop_strings_cut_where_the_text_says(data: st.DataObject) -> None:
    """Against a slow rule: after every token, search the text."""
    piece = st.sampled_from(["a", "b", "é", "🙂"])
    pieces = data.draw(st.lists(piece, max_size=20))
    stop = tuple(data.draw(st.lists(st.lists(piece, min_size=1, max_size=3).map("".join), min_size=1, max_size=3)))
    tokens = [byte_ids(p.encode()) for p in pieces]
    expected: tuple[str, int | None] = ("".join(pieces), None)
    early = data.draw(st.integers(0, len(pieces)))  # pieces in whose text none ends
    for count in range(early + 1, len(pieces) + 1):
        text, begin = "".join(pieces[:count]), len("".join(pieces[:early])) + 1
        places = [text.find(string, max(0, begin - len(string))) for string in stop]
        texts = [text[:place] for place in places if place >= 0]
        if texts:
            expected = (min(texts, key=len), sum(map(len, tokens[:count])))
            break
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=stop, least=len([*chain(*tokens[:early])]))
    found = "".join(pushes(detokenizer, list(chain(*tokens)), data.draw(sizes)))
    assert (found, detokenizer.stopped_at) == expected


def test_special_tokens_as_stop_strings() -> None:
    """Those that the text does not show. Any other may stand in a stop string, where it is searched for as text."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.pad_token = "x"
    intake = Intake(Target(tiny_model(vocab_size=400), tokenizer), max_length=256, can_speculate=False)
    request = intake.request([1, 2], SamplingParams(stop=("<turn>", "xy")), speculate=False)
    assert byte_level().convert_tokens_to_ids("<turn>") in request.stop_ids
    with pytest.raises(ValueError, match=r"stop='x<turn>' has text around the special token '<turn>'"):
        intake.request([1, 2], SamplingParams(stop="x<turn>"), speculate=False)


TOKENIZERS = {"byte-level": byte_level(), "bytes": byte_tokenizer(), "sentencepiece": sentencepiece_style()}
SPELLINGS = {name: Spelling(tokenizer, 400) for name, tokenizer in TOKENIZERS.items()}


def test_common_tokens_spell_the_same() -> None:
    """Not by their names: "Ġthe" and "▁the" are one token, and a byte is one whatever it is called."""
    own, other = SPELLINGS["byte-level"], SPELLINGS["sentencepiece"]
    pairs = own.common(other)
    assert [pair[::-1] for pair in sorted(pairs, key=lambda pair: pair[1])] == other.common(own)
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
    for tokens in (sequence, sequence[1:]):
        assert Retokenized(SPELLINGS["byte-level"], Spelling(own, 400)).read(tokens) == wanted
    assert Retokenized(Spelling(own, 400), SPELLINGS["byte-level"]).read([begin, *wanted]) == sequence


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


def test_a_second_beginning_is_noticed() -> None:
    """Text that went through a chat template begins with a BOS already."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = END_OF_TEXT
    begin = processors.TemplateProcessing(f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert encode_prompt(tokenizer, "a")[0] == 0
    with pytest.warns(UserWarning, match="two BOS tokens"):
        assert encode_prompt(tokenizer, f"{END_OF_TEXT}a")[:2] == [0, 0]
