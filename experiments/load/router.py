"""Chooses a replica for each request: one that has its beginning in its cache, or the one with the least to do.

Pure host code that knows tokens and counts alone, so it serves engines, processes and a virtual clock alike.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.arguments import whole


@dataclass
class _Routed:
    """A request that has not ended."""

    replica: int
    prompt_tokens: int
    output_tokens: int

    @property
    def left(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Router:
    """Keeps account of what replicas have been given, and says who gets the next request.

    A prompt is a chain of whole blocks; the name of a block is the hash of the one before it and of its own tokens, as
    in caches that share beginnings. Of the replicas that have at most ``margin`` tokens more to do than the least busy
    one, a request goes to the one that was given most of its chain before; where none of them was given its beginning,
    to the least busy one. What there is to do is counted in tokens of prompts and outputs that are outstanding; among
    equals, the replica that was given the fewest requests is taken. Nothing waits in the router.

    Args:
        block: Tokens of a block; None where replicas share no beginnings, so that only what there is to do counts.
        margin: Tokens that a replica may have to do beyond the least busy one and still be preferred.
        remembered: Blocks that are remembered of each replica, those used last: what its cache can hold.
    """

    def __init__(self, replicas: int, *, block: int | None = 16, margin: int = 2048, remembered: int = 65_536):
        self._block = None if block is None else whole("block", block, least=1)
        self._margin, self._remembered = whole("margin", margin, least=0), whole("remembered", remembered, least=1)
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(whole("replicas", replicas, least=1))]
        self._given = [0] * replicas
        self._routed: dict[int, _Routed] = {}
        self.outstanding = [0] * replicas
        """The tokens that each replica still has to do."""

    def route(self, request: int, prompt_ids: Sequence[int], output_tokens: int) -> int:
        """Return the replica for a request, which has to do it from now on."""
        chain = list(self._chain(prompt_ids))
        known = [next((n for n, name in enumerate(chain) if name not in seen), len(chain)) for seen in self._seen]
        least = min(self.outstanding)
        near = [number for number, left in enumerate(self.outstanding) if left - least <= self._margin]
        replica = min(near, key=lambda n: (-known[n], self.outstanding[n], self._given[n], n))
        self._remember(self._seen[replica], chain)
        self._given[replica] += 1
        self._routed[request] = _Routed(replica, len(prompt_ids), output_tokens)
        self.outstanding[replica] += len(prompt_ids) + output_tokens
        return replica

    def emitted(self, request: int, tokens: int) -> None:
        """Take tokens of an output off what there is to do; with the first of them the prompt is done, too."""
        routed = self._routed[request]
        before = routed.left
        routed.prompt_tokens, routed.output_tokens = 0, max(routed.output_tokens - tokens, 0)
        self.outstanding[routed.replica] -= before - routed.left

    def ended(self, request: int) -> None:
        """Take a request off what there is to do, whatever is left of it."""
        routed = self._routed.pop(request)
        self.outstanding[routed.replica] -= routed.left

    def _chain(self, prompt_ids: Sequence[int]) -> Iterator[int]:
        if self._block is None:
            return
        name, size = 0, self._block
        for end in range(size, len(prompt_ids) + 1, size):
            name = hash((name, *prompt_ids[end - size : end]))
            yield name

    def _remember(self, seen: OrderedDict[int, None], chain: Sequence[int]) -> None:
        for name in reversed(chain):  # the last block is forgotten first: a chain is found by its beginning
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > self._remembered:
            seen.popitem(last=False)
