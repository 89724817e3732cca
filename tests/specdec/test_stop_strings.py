"""Stop strings cut at the right token, wherever they begin, and may name special tokens."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.text import Detokenizer
from tests.specdec.texts import byte_ids, byte_level, decode, pieces_of, pushes, sentencepiece_style, sizes


def test_a_stop_string_within_a_token() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, byte_ids(b"x"), stop=("orl",))
    ids = tokenizer("Hello world, hello")["input_ids"]
    assert "".join(pushes(detokenizer, ids, [2])) == "Hello w"
    assert detokenizer.stopped_at is not None
    assert decode(tokenizer, ids[: detokenizer.stopped_at]).startswith("Hello worl")
    assert "orl" not in decode(tokenizer, ids[: detokenizer.stopped_at - 1])


@pytest.mark.parametrize(
    ("text", "stop", "size", "pieces", "stopped_at"),
    [
        ("ab END cd", ["END"], 1, ["a", "b", " ", "", "", "", "", "", "", ""], 6),
        ("ab END cd", ["END"], 4, ["ab ", "", "", ""], 6),  # over two rounds
        ("ab END cd", ["END"], 9, ["ab ", ""], 6),
        ("aENb", ["END"], 1, ["a", "", "", "ENb", ""], None),  # its beginning is held and given back
        ("aEN", ["END"], 1, ["a", "", "", "EN"], None),
        ("EEEND", ["EEND"], 1, ["", "", "E", "", "", ""], 5),
        ("xabcd", ["bcd", "ab"], 1, ["x", "", "", "", "", ""], 3),  # the one that ends first counts
        ("xabcd", ["abcd", "b"], 5, ["xa", ""], 3),
        ("xab", ["b", "ab"], 3, ["x", ""], 3),  # of two that end together, the longer
        ("\n\nU\n\nUser", ["\n\nUser", "\n\n\n"], 1, ["", "", "", "\n\nU", "", "", "", "", "", ""], 9),
        ("aé🙂b", ["é🙂"], 1, ["a", "", "", "", "", "", "", "", ""], 7),
        ("a<end>b", ["<end>"], 1, ["a", *[""] * 7], 6),  # ordinary tokens spell a special one
    ],
)
def test_where_a_text_of_one_token_per_byte_is_cut(text, stop, size, pieces, stopped_at) -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=tuple(stop))
    assert pushes(detokenizer, byte_ids(text.encode()), [size]) == pieces
    assert detokenizer.stopped_at == stopped_at


def test_ends_of_prompts_of_characters_and_of_outputs() -> None:
    # One round: the space, and then a character's first byte.
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=(" ",))
    assert detokenizer.push(byte_ids("a 🙂".encode())[:3]) == "a"
    assert detokenizer.stopped_at == 2
    # The prompt's text is no part of a stop string.
    assert Detokenizer(byte_level(), byte_ids(b"xEN"), stop=("END",)).push(byte_ids(b"D.")) == "D."
    # Nothing follows one.
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("b",))
    assert detokenizer.push(byte_ids(b"abc")) == "a" and detokenizer.stopped_at == 2
    assert detokenizer.push(byte_ids(b"more")) == "" and detokenizer.flush() == "" and detokenizer.stopped_at == 2


# ---------------------------------------------------------------- with special tokens


def special(name: str) -> int:
    return byte_level().convert_tokens_to_ids(name)


@pytest.mark.parametrize("size", [1, 20])
@pytest.mark.parametrize(
    ("stop", "text", "stopped_at"),
    [
        (("<turn>",), "hi", 3),
        (("hi<turn>",), "", 3),
        (("<turn>\n",), "hi", 4),
        (("i<turn>\nU",), "h", 5),
        (("<turn><end>",), "hi\nUa", 8),
        (("<end>", "U"), "hi\n", 5),
        (("turn",), "hi\nUab", None),  # a part of its name is no text
        (("<turn>x",), "hi\nUab", None),
        (("<turn>x", "hi\n"), "", 4),  # the text shows "hi\n" although a special token stands in it
    ],
)
def test_a_stop_string_may_name_a_special_token(
    stop: tuple[str, ...], text: str, stopped_at: int | None, size: int
) -> None:
    turn, end = special("<turn>"), special("<end>")
    ids = [*byte_ids(b"hi"), turn, *byte_ids(b"\nUa"), turn, end, *byte_ids(b"b")]
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=tuple(stop))
    assert ("".join(pushes(detokenizer, ids, [size])), detokenizer.stopped_at) == (text, stopped_at)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_stop_strings_cut_where_the_spelled_text_says(data: st.DataObject) -> None:
    """Against a slow rule: after every token, search the shown text, and the text with its special tokens spelled."""
    piece = st.sampled_from(["a", "b", "é", "🙂", "<turn>", "<end>"])
    pieces = data.draw(st.lists(piece, max_size=20))
    strings = st.lists(piece, min_size=1, max_size=3).map("".join)
    stop = tuple(data.draw(st.lists(strings, min_size=1, max_size=3)))

    def shown(text: str) -> str:
        return text.replace("<turn>", "").replace("<end>", "")

    tokens = [[special(p)] if p[0] == "<" else byte_ids(p.encode()) for p in pieces]
    expected: tuple[str, int | None] = (shown("".join(pieces)), None)
    for count in range(1, len(pieces) + 1):
        spelled = "".join(pieces[:count])
        texts = [shown(spelled)[: shown(spelled).find(string)] for string in stop if string in shown(spelled)]
        texts += [shown(spelled[: spelled.find(string)]) for string in stop if string in spelled]
        if texts:
            expected = (min(texts, key=len), sum(map(len, tokens[:count])))
            break
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=tuple(stop))
    found = "".join(pushes(detokenizer, list(chain(*tokens)), data.draw(sizes)))
    assert (found, detokenizer.stopped_at) == expected


def test_special_tokens_in_the_middle_of_a_character_and_of_sentencepiece_style() -> None:
    """The bytes before and after it make up one character, unless the output ends at it."""
    emoji = byte_ids("🙂".encode())
    middle = [*byte_ids(b"a"), *emoji[:2], special("<turn>"), *emoji[2:], *byte_ids(b"b")]
    bytewise, pieces = (byte_level(), byte_ids(b"x"), middle), (sentencepiece_style(), pieces_of("hello"))
    for (tokenizer, prompt, ids), stop, text, stopped_at in (
        (bytewise, ("a<turn>", "<turn>x"), "a🙂b", None),
        (bytewise, ("<turn>",), "a\ufffd", 4),
        # Ordinary tokens spell its beginning.
        ((*bytewise[:2], [*byte_ids(b"a<end>"), special("<end>"), *byte_ids(b"!")]), ("<end>!",), "a", 8),
        ((*pieces, pieces_of("▁world", "<s>", "▁the", "▁a")), ("<s>",), " world", 2),
        ((*pieces, pieces_of("▁world", "<s>", "▁the", "▁a")), ("<s> the",), " world", 3),
    ):
        for size in (1, 3, 20):
            detokenizer = Detokenizer(tokenizer, prompt, stop=stop)
            assert "".join(pushes(detokenizer, ids, [size])) == text and detokenizer.stopped_at == stopped_at


def test_windows_stay_short_while_a_named_special_token_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    plain = Detokenizer._decode

    def counted(self: Detokenizer, token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return plain(self, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", counted)
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("<turn>!",))
    ids = [*byte_ids(b"some words "), special("<turn>")] * 30 + [special("<end>"), special("<turn>")] * 30
    assert "".join(pushes(detokenizer, ids, [4])) == "some words " * 30
    assert longest < 60
