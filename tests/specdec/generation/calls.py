"""What calls of transformers' generate are given: a padded batch, a tokenizer of letters, penalties."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

VOCAB, PAD = 32, 31


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[PAD, PAD, 3, 4, 3, 4], [5, 6, 7, 8, 9, 5], [PAD, 1, 2, 1, 2, 1]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def penalties(*ignored: int) -> list[RepetitionPenaltyLogitsProcessor]:
    """A penalty with a length per row; none where transformers does not have it yet (5.17)."""
    try:
        return [RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=torch.tensor(ignored))]
    except ValueError:
        return []


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter per token, but for a special token: 31 is the padding."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCD"
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False)
