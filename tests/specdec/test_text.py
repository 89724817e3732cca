"""Detokenizing in pieces: nothing is split, lost or said too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.text import Detokenizer, encode_prompt
from tests.specdec.texts import CORPUS, byte_ids, byte_level, decode, pieces_of, pushes, sentencepiece_style, sizes

# ---------------------------------------------------------------- characters


def test_a_character_is_not_split_over_tokens() -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"))
    emoji = byte_ids("🙂".encode())
    assert len(emoji) == 4
    assert [detokenizer.push([token]) for token in emoji] == ["", "", "", "🙂"]
    assert detokenizer.push(byte_ids("é".encode())) == "é"
    assert detokenizer.flush() == ""


def test_what_stands_before_an_incomplete_character_is_not_held() -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"))
    ids = byte_ids("yes é".encode())
    assert detokenizer.push(ids[:-1]) == "yes "
    assert detokenizer.push(ids[-1:]) == "é"


def test_an_output_that_ends_inside_a_character() -> None:
    detokenizer = Detokenizer(byte_level(), byte_ids(b"x"))
    assert detokenizer.push(byte_ids("a🙂".encode())[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_malformed_bytes_become_replacement_characters() -> None:
    assert pushes(Detokenizer(byte_level(), []), byte_ids(b"a\xffb\x80"), [1]) == ["a", "", "\ufffdb", "", "\ufffd"]


def test_a_prompt_that_ends_inside_a_character() -> None:
    ids = byte_ids("x🙂y".encode())
    detokenizer = Detokenizer(byte_level(), ids[:3])
    assert detokenizer.push(ids[3:]) == "🙂y"


def test_a_prompt_whose_last_tokens_begin_inside_a_character() -> None:
    prompt = byte_ids("xx🙂🙂🙂🙂".encode())
    assert pushes(Detokenizer(byte_level(), prompt), byte_ids("🙂!".encode()), [1]) == ["", "", "", "🙂", "!", ""]
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


bytes_or_text = st.one_of(st.binary(max_size=60), st.text(max_size=40).map(lambda text: text.encode()))


@given(prompt=st.text(max_size=20), data=bytes_or_text, sizes=sizes)
@settings(max_examples=150, deadline=None)
def test_byte_level_pieces_make_up_the_decoded_text(prompt: str, data: bytes, sizes: list[int]) -> None:
    tokenizer = byte_level()
    prompt_ids, ids = tokenizer(prompt)["input_ids"], byte_ids(data)
    pieces = pushes(Detokenizer(tokenizer, prompt_ids), ids, sizes)
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len(prompt) :]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_byte_level_tokens_make_up_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    prompt_ids = tokenizer("A prompt, é")["input_ids"]
    pieces = pushes(Detokenizer(tokenizer, prompt_ids), ids, data.draw(sizes))
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len("A prompt, é") :]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_sentencepiece_style_pieces_make_up_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = sentencepiece_style()
    piece = st.sampled_from(["▁", "▁▁", "▁a", "▁the", "hello", "é", "b", ".", "<s>", "\n", "日", "🙂", "日本"])
    prompt_ids = pieces_of("▁a", *data.draw(st.lists(piece, max_size=20)))
    ids = pieces_of(*data.draw(st.lists(piece, max_size=60)))
    pieces = pushes(Detokenizer(tokenizer, prompt_ids), ids, data.draw(sizes))
    assert "".join(pieces) == decode(tokenizer, prompt_ids + ids)[len(decode(tokenizer, prompt_ids)) :]


# ---------------------------------------------------------------- without a tokenizer


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, [1, 2])
    assert detokenizer.push([3, 4]) == "" and detokenizer.flush() == "" and detokenizer.stopped_at is None
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Detokenizer(None, [1], stop=("x",))


def test_prompts_are_encoded() -> None:
    assert decode(byte_level(), encode_prompt(byte_level(), "Hello é")) == "Hello é"
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        encode_prompt(None, "Hello")
    with pytest.raises(ValueError, match="the prompt '' has no tokens"):
        encode_prompt(byte_level(), "")
