"""Stop strings cut at the right token, wherever they begin, and may name special tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.text import Detokenizer
from tests.specdec.texts import byte_ids, byte_level, decode, pieces_of, pushes, sentencepiece_style, sizes


def stopping(text: str, *stop: str, sizes: tuple[int, ...] = (1,)) -> tuple[list[str], int | None]:
    """Pieces and ``stopped_at`` of a text of one token per byte."""
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=stop)
    return pushes(detokenizer, byte_ids(text.encode()), list(sizes)), detokenizer.stopped_at


def test_a_stop_string_over_several_tokens() -> None:
    assert stopping("ab END cd", "END") == (["a", "b", " ", "", "", "", "", "", "", ""], 6)


def test_a_stop_string_over_several_rounds() -> None:
    assert stopping("ab END cd", "END", sizes=(4,)) == (["ab ", "", "", ""], 6)


def test_a_stop_string_within_a_round() -> None:
    assert stopping("ab END cd", "END", sizes=(9,)) == (["ab ", ""], 6)


def test_a_stop_string_within_a_token() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, byte_ids(b"x"), stop=("orl",))
    ids = tokenizer("Hello world, hello")["input_ids"]
    assert "".join(pushes(detokenizer, ids, [2])) == "Hello w"
    assert detokenizer.stopped_at is not None
    assert decode(tokenizer, ids[: detokenizer.stopped_at]).startswith("Hello worl")
    assert "orl" not in decode(tokenizer, ids[: detokenizer.stopped_at - 1])


def test_the_beginning_of_a_stop_string_is_held_and_given_back() -> None:
    assert stopping("aENb", "END") == (["a", "", "", "ENb", ""], None)
    assert stopping("aEN", "END") == (["a", "", "", "EN"], None)
    assert stopping("EEEND", "EEND") == (["", "", "E", "", "", ""], 5)


def test_the_stop_string_that_ends_first_counts() -> None:
    assert stopping("xabcd", "bcd", "ab") == (["x", "", "", "", "", ""], 3)
    assert stopping("xabcd", "abcd", "b", sizes=(5,)) == (["xa", ""], 3)
    assert stopping("xab", "b", "ab", sizes=(3,)) == (["x", ""], 3), "of two that end together, the longer"


def test_beginnings_of_several_stop_strings_overlap() -> None:
    assert stopping("\n\nU\n\nUser", "\n\nUser", "\n\n\n") == (["", "", "", "\n\nU", "", "", "", "", "", ""], 9)


def test_a_stop_string_of_characters_of_several_bytes() -> None:
    assert stopping("aé🙂b", "é🙂") == (["a", "", "", "", "", "", "", "", ""], 7)


def test_a_stop_string_in_the_token_that_begins_a_character() -> None:
    # One round: the space, and then a character's first byte.
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=(" ",))
    assert detokenizer.push(byte_ids("a 🙂".encode())[:3]) == "a"
    assert detokenizer.stopped_at == 2


def test_the_prompt_s_text_is_no_part_of_a_stop_string() -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"xEN"), stop=("END",))
    assert detokenizer.push(byte_ids(b"D.")) == "D."


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("b",))
    assert detokenizer.push(byte_ids(b"abc")) == "a" and detokenizer.stopped_at == 2
    assert detokenizer.push(byte_ids(b"more")) == "" and detokenizer.flush() == "" and detokenizer.stopped_at == 2


def expected_stop(full: str, stop: tuple[str, ...], texts: list[str]) -> tuple[str, int | None]:
    """The text before the stop string that ends first, and the first token after which one is complete."""
    ends = [end for end in range(len(full) + 1) if full[:end].endswith(stop)]
    if not ends:
        return full, None
    longest = max(len(string) for string in stop if full[: ends[0]].endswith(string))
    return full[: ends[0] - longest], next(i for i, text in enumerate(texts) if any(string in text for string in stop))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stop_strings_cut_where_the_text_says(data: st.DataObject) -> None:
    letters = st.text(alphabet="abé🙂", min_size=1, max_size=4)
    text = data.draw(st.text(alphabet="abé🙂 ", max_size=30))
    stop = tuple(data.draw(st.lists(letters, min_size=1, max_size=3)))
    ids = byte_ids(text.encode())
    tokenizer = byte_level()
    texts = [decode(tokenizer, ids[:count]).rstrip("\ufffd") for count in range(len(ids) + 1)]
    detokenizer = Detokenizer(tokenizer, byte_ids(b"x"), stop=stop)
    pieces = pushes(detokenizer, ids, data.draw(sizes))
    assert ("".join(pieces), detokenizer.stopped_at) == expected_stop(text, stop, texts)


# ---------------------------------------------------------------- with special tokens


def special(name: str) -> int:
    return byte_level().convert_tokens_to_ids(name)


@pytest.mark.parametrize("size", [1, 2, 20])
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
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=stop)
    assert ("".join(pushes(detokenizer, ids, [size])), detokenizer.stopped_at) == (text, stopped_at)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stop_strings_with_special_tokens_cut_where_the_spelled_text_says(data: st.DataObject) -> None:
    """Against a slow rule: after every token, search the shown text, and the text with its special tokens spelled."""
    piece = st.sampled_from(["a", "b", "<turn>", "<end>"])
    pieces = data.draw(st.lists(piece, max_size=20))
    stop = tuple(
        "".join(p) for p in data.draw(st.lists(st.lists(piece, min_size=1, max_size=3), min_size=1, max_size=3))
    )

    def shown(text: str) -> str:
        return text.replace("<turn>", "").replace("<end>", "")

    expected: tuple[str, int | None] = (shown("".join(pieces)), None)
    for count in range(1, len(pieces) + 1):
        spelled = "".join(pieces[:count])
        texts = [shown(spelled)[: shown(spelled).find(string)] for string in stop if string in shown(spelled)]
        texts += [shown(spelled[: spelled.find(string)]) for string in stop if string in spelled]
        if texts:
            expected = (min(texts, key=len), count)
            break
    ids = [special(p) if len(p) > 1 else byte_ids(p.encode())[0] for p in pieces]
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=stop)
    assert ("".join(pushes(detokenizer, ids, data.draw(sizes))), detokenizer.stopped_at) == expected


def test_a_named_special_token_that_ordinary_tokens_spell_counts_too() -> None:
    assert stopping("a<end>b", "<end>") == (["a", *[""] * 7], 6)
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("<end>!",))
    ids = [*byte_ids(b"a<end>"), special("<end>"), *byte_ids(b"!")]
    assert "".join(pushes(detokenizer, ids, [3])) == "a" and detokenizer.stopped_at == 8, "as the text shows it"


def test_a_special_token_in_the_middle_of_a_character() -> None:
    """The bytes before and after it make up one character, unless the output ends at it."""
    emoji = byte_ids("🙂".encode())
    ids = [*byte_ids(b"a"), *emoji[:2], special("<turn>"), *emoji[2:], *byte_ids(b"b")]
    for size in (1, 3, 20):
        detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("a<turn>", "<turn>x"))
        assert "".join(pushes(detokenizer, ids, [size])) == "a🙂b" and detokenizer.stopped_at is None
        detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("<turn>",))
        assert "".join(pushes(detokenizer, ids, [size])) == "a\ufffd" and detokenizer.stopped_at == 4


def test_special_tokens_of_sentencepiece_style() -> None:
    tokenizer = sentencepiece_style()
    ids = pieces_of("▁world", "<s>", "▁the", "▁a")
    for size in (1, 2, 20):
        detokenizer = Detokenizer(tokenizer, pieces_of("hello"), stop=("<s>",))
        assert "".join(pushes(detokenizer, ids, [size])) == " world" and detokenizer.stopped_at == 2
        detokenizer = Detokenizer(tokenizer, pieces_of("hello"), stop=("<s> the",))
        assert "".join(pushes(detokenizer, ids, [size])) == " world" and detokenizer.stopped_at == 3


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_text_is_the_same_while_a_named_special_token_is_looked_for(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1) | st.just(special("<turn>")), max_size=60))
    prompt_ids = tokenizer("A prompt, é")["input_ids"]
    detokenizer = Detokenizer(tokenizer, prompt_ids, stop=("<turn>never", "never<end>"))
    pieces = pushes(detokenizer, ids, data.draw(sizes))
    assert detokenizer.stopped_at is None
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len("A prompt, é") :]


def test_windows_stay_short_while_a_named_special_token_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    plain = Detokenizer._decode

    def counted(self: Detokenizer, token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return plain(self, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", counted)
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"), stop=("<turn>!",))
    ids = [*byte_ids(b"some words "), special("<turn>")] * 100 + [special("<end>"), special("<turn>")] * 100
    assert "".join(pushes(detokenizer, ids, [4])) == "some words " * 100
    assert longest < 60
