"""A tokenizer trained on the standard library, and a blank model with it: the target of a training on text alone."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.datasets.sources import read_source, training_files

END_OF_TEXT = "<|endoftext|>"

# Words, numbers and punctuation with the space before them; a line break takes the next line's indentation along.
_PIECES = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|[ \t]+(?=[ \t])|\s+")


def make_blank(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write a blank target: it has a vocabulary and positions, and its few weights are random.

    A language model that is trained for it with ``loss=cross_entropy`` (``recipe=bundled_target``) learns from the
    text, and nothing from the blank.

    Args:
        folder: Takes the model and the tokenizer, a byte-level BPE.
    """
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
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"bos_token_id": None, "eos_token_id": fast.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(fast), max_position_embeddings=max_length, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
