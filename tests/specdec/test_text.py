"""Detokenizing in pieces: nothing is split, lost or said too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.text import Detokenizer, encode_prompt
from tests.specdec.texts import CORPUS, byte_ids, byte_level, decode, pieces_of, pushes, sentencepiece_style, sizes


@pytest.mark.parametrize(
    ("prompt", "output", "size", "pieces"),
    [
        (b"x", "🙂é".encode(), 1, ["", "", "", "🙂", "", "é", ""]),
        (b"x", "yes é".encode(), 5, ["yes ", "é", ""]),  # what stands before an incomplete character is not held
        (b"x", "a🙂".encode()[:-1], 4, ["a", "\ufffd"]),  # an output that ends inside a character
        (b"", b"a\xffb\x80", 1, ["a", "", "\ufffdb", "", "\ufffd"]),
        ("x🙂".encode()[:3], "x🙂y".encode()[3:], 9, ["🙂y", ""]),  # a prompt that ends inside a character
        ("xx🙂🙂🙂🙂".encode(), "🙂!".encode(), 1, ["", "", "", "🙂", "!", ""]),
    ],
)
def test_a_character_is_not_split_over_tokens(prompt: bytes, output: bytes, size: int, pieces: list[str]) -> None:
    assert pushes(Detokenizer(byte_level(), byte_ids(prompt)), byte_ids(output), [size]) == pieces


def test_a_prompt_whose_last_tokens_begin_inside_a_character() -> None:
    prompt = pieces_of("▁a", "日本語日本語")
    assert pushes(Detokenizer(sentencepiece_style(), prompt), pieces_of("日", "a"), [1]) == ["", "", "日", "a", ""]


def test_spaces_that_a_tokenizer_strips_from_a_text_s_beginning() -> None:
    tokenizer = sentencepiece_style()
    detokenizer = Detokenizer(tokenizer, pieces_of("<s>", "hello"))
    assert detokenizer.push(pieces_of("▁world")) == " world"
    assert detokenizer.push(pieces_of("<s>", "▁world", ".")) == " world."
    assert detokenizer.push(pieces_of("▁", "▁", "▁a")) == "   a"
    assert Detokenizer(tokenizer, pieces_of("<s>")).push(pieces_of("▁world")) == "world", "nothing stands before it"


def test_spaces_after_more_special_tokens_than_the_window_is_long() -> None:
    detokenizer = Detokenizer(sentencepiece_style(), pieces_of("hello"))
    ids = pieces_of("▁world", *["<s>"] * 60, "▁the")
    assert "".join(pushes(detokenizer, ids, [1])) == " world the"


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    turn, end = tokenizer.convert_tokens_to_ids(["<turn>", "<end>"])
    detokenizer = Detokenizer(tokenizer, [turn])
    assert detokenizer.push([*byte_ids(b"hi"), turn, *byte_ids(b" you"), end]) == "hi you"


def test_a_long_output_is_decoded_in_short_windows() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, byte_ids(b"x"))
    ids = tokenizer(CORPUS[1] * 20)["input_ids"]
    assert "".join(pushes(detokenizer, ids, [3, 1, 5])) == CORPUS[1] * 20
    assert len(detokenizer._window) < 50


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_byte_level_tokens_make_up_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = byte_level()
    stop = data.draw(st.sampled_from([(), ("<turn>never", "never<end>")]))  # it looks for special tokens then
    tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=60)
    ids = data.draw(tokens | st.text(max_size=40).map(lambda text: byte_ids(text.encode())))
    prompt_ids = tokenizer("A prompt, é")["input_ids"]
    pieces = pushes(Detokenizer(tokenizer, prompt_ids, stop=stop), ids, data.draw(sizes))
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len("A prompt, é") :]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sentencepiece_style_pieces_make_up_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = sentencepiece_style()
    piece = st.sampled_from(["▁", "▁▁", "▁a", "▁the", "hello", "é", "b", ".", "<s>", "\n", "日", "🙂", "日本"])
    prompt_ids = pieces_of("▁a", *data.draw(st.lists(piece, max_size=20)))
    ids = pieces_of(*data.draw(st.lists(piece, max_size=60)))
    pieces = pushes(Detokenizer(tokenizer, prompt_ids), ids, data.draw(sizes))
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len(decode(tokenizer, prompt_ids)) :]


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, [1, 2])
    assert detokenizer.push([3, 4]) == "" and detokenizer.flush() == "" and detokenizer.stopped_at is None
    with pytest.raises(ValueError, match="tokenizer"):
        Detokenizer(None, [1], stop=("x",))


def test_prompts_are_encoded() -> None:
    assert decode(byte_level(), encode_prompt(byte_level(), "Hello é")) == "Hello é"
    with pytest.raises(ValueError, match="tokenizer"):
        encode_prompt(None, "Hello")
    with pytest.raises(ValueError, match="the prompt ''"):
        encode_prompt(byte_level(), "")
