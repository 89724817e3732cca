"""Grammars that outputs must belong to, by xgrammar (arXiv 2411.15100): compiled once, and followed at every node.

A request's matcher stands behind its last token. For a draft tree it walks down every branch and back, and notes at
each node which tokens may follow there. So p at a node is the law of plain constrained decoding at the same place, and
a rule that is exact without a grammar is exact with it.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int32
from transformers import PreTrainedTokenizerBase

from specdec.arguments import shown
from specdec.origin import first_sentence
from specdec.requests import Grammar, Matcher

MOST_COMPILED = 64  # grammars that are kept
_MOST_TRIED = 2_000  # tokens, to spell one text of a grammar
# The time and the line of C++ before xgrammar's messages.
_PLACE = re.compile(r"\[[\d:]+\] \S+?:\d+: (?:Check failed: \(.*?\) is false: )?")


class Grammars:
    """The grammars of one target; ``compiled`` makes one that ends with one of some tokens, and keeps the last."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.compiled = lru_cache(maxsize=MOST_COMPILED)(self._compile)

    def matcher(self, grammar: Grammar, stop_ids: frozenset[int]) -> "GrammarMatcher":
        """Return a matcher for an output that one of ``stop_ids`` ends; refuses what is no grammar, or not spelled."""
        return GrammarMatcher(self.compiled(grammar, stop_ids), mask_drafts=grammar.mask_drafts)

    def _compile(self, grammar: Grammar, stop_ids: frozenset[int]) -> Any:
        if not stop_ids:
            raise ValueError("a grammar needs a token that ends the output: no ignore_eos, or give stop_token_ids")
        compiler = self._compiler(stop_ids)
        try:
            if grammar.json_schema is not None:
                compiled = compiler.compile_json_schema(grammar.json_schema, any_whitespace=grammar.any_whitespace)
            elif grammar.regex is not None:
                compiled = compiler.compile_regex(grammar.regex)
            else:
                compiled = compiler.compile_grammar(grammar.ebnf)
        except (RuntimeError, ValueError) as error:
            reason = first_sentence(Exception(_PLACE.sub("", str(error)))).rstrip(".")
            raise ValueError(f"cannot read the grammar {shown(grammar.written)}: {reason}") from None
        found = dead_end(compiled)
        if found is not None:
            reason = f"no token goes on after {found!r}; give a grammar of characters that its tokens have"
            raise ValueError(f"the tokenizer cannot spell the grammar {shown(grammar.written)}: {reason}")
        return compiled

    @lru_cache(maxsize=4)  # noqa: B019 (as many as a target has kinds of ends; it lives as long as the target)
    def _compiler(self, stop_ids: frozenset[int]) -> Any:
        if self._tokenizer is None:
            raise ValueError("a grammar needs a tokenizer: give the Target one")
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("grammars need xgrammar: pip install 'specdec-research[grammar]'") from error
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(stop_ids)
        )
        return xgrammar.GrammarCompiler(info)


class GrammarMatcher(Matcher):
    """The matcher of one request in a grammar that was ``compiled``."""

    def __init__(self, compiled: Any, *, mask_drafts: bool = True):
        import xgrammar

        self.masks_drafts = mask_drafts
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // 32)
        self._stuck = False

    def masks(
        self, tokens: Int[np.ndarray, " node"], paths: Bool[np.ndarray, "some node"]
    ) -> Int32[np.ndarray, "some word"]:
        """Return masks as ``Matcher`` says; all is allowed where no output comes, behind ends and what is forbidden."""
        parents, ends = np.full(len(tokens), -1), np.zeros(len(paths), dtype=np.int64)
        for number, path in enumerate(paths):
            nodes = np.flatnonzero(path)
            parents[nodes[1:]], ends[number] = nodes[:-1], nodes[-1]
        first, sibling = (torch.full((len(tokens),), -1, dtype=torch.long) for _ in range(2))
        for node in range(len(tokens) - 1, 0, -1):
            if (parent := int(parents[node])) >= 0:
                sibling[node], first[parent] = first[parent], node
        masks = np.full((len(tokens), self._words), -1, dtype=np.int32)
        read = torch.from_numpy(tokens.astype(np.int64))
        self._matcher.traverse_draft_tree(first, sibling, read, torch.from_numpy(masks))
        empty = (masks == 0).all(-1)
        self._stuck = bool(empty[:1].any())
        masks[empty] = -1
        return masks[ends]

    def follow(self, tokens: Sequence[int]) -> str | None:
        """Go on, as ``Matcher`` says."""
        if self._stuck:
            return "no token of the tokenizer goes on where the output has come to in its grammar"
        for token in tokens:
            if not self._matcher.accept_token(token):
                return f"token {token} was accepted, and the grammar forbids it"
        return None


def dead_end(compiled: Any) -> str | None:
    """Return the longest text behind which no token goes on, if tokens spell no text of a grammar at all.

    With a token for every byte they spell everything. Otherwise some thousand are tried, depth first: returns None if
    one text was found, or none within these.
    """
    import xgrammar

    tokenizer = compiled.tokenizer_info
    spelling = tokenizer.decoded_vocab
    if len({text for text in spelling if len(text) == 1}) == 256:
        return None
    stops = set(tokenizer.stop_token_ids)
    matcher = xgrammar.GrammarMatcher(compiled)
    vocab = tokenizer.vocab_size
    bits = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
    path, choices, farthest = [], [], b""
    for _ in range(_MOST_TRIED):
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), count=vocab, bitorder="little")).tolist()
        if not stops.isdisjoint(allowed):
            return None
        choices.append(allowed)
        farthest = max(farthest, b"".join(spelling[token] for token in path), key=len)
        while not choices[-1]:
            choices.pop()
            if not choices:
                return farthest.decode(errors="replace")
            matcher.rollback(1)
            path.pop()
        token = choices[-1].pop()
        matcher.accept_token(token)
        path.append(token)
    return None
