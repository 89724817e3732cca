"""A suffix automaton of a text that grows: the longest end of it that has occurred before, and where that was first.

Blumer et al. 1985 (Theoretical Computer Science 40); its use for drafts is that of Hu et al. 2024 (arXiv 2411.10666).
"""

from collections.abc import Iterable


class SuffixAutomaton:
    """The smallest automaton that accepts all ends of a text. A token costs a few steps, whatever the text's length.

    A state stands for the strings that end at the same places. State 0 is the empty string's.

    Attributes:
        tokens: The text so far.
        following: For every state the states that tokens lead to.
        link: For every state that of its longest string that ends elsewhere, too; -1 for state 0.
        length: The number of tokens of the state's longest string.
        ends: The number of tokens up to where its strings ended first.
        state: The state of the longest end of the text that has occurred before.
        match: The number of tokens of that end.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.ends = [-1], [0], [0]
        self.state = self.match = 0
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text's end."""
        for token in tokens:
            self.state, self.match = self.after(token)  # before the token is added, or it would find itself
            self._add(token)

    def after(self, token: int) -> tuple[int, int]:
        """Returns the state and the length of the longest end of the text and this token that has occurred."""
        state, match = self.state, self.match
        while state and token not in self.following[state]:
            state = self.link[state]
            match = self.length[state]
        found = self.following[state].get(token)
        return (0, 0) if found is None else (found, match + 1)

    def climbed(self, state: int, wanted: int) -> int:
        """Returns the first of a state and its links behind which so many tokens stand, or else the last of them."""
        while state and self.link[state] > 0 and len(self.tokens) - self.ends[state] < wanted:
            state = self.link[state]
        return state

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        new = self._state({}, len(self.tokens), len(self.tokens))
        state = self._last
        while state >= 0 and token not in self.following[state]:
            self.following[state][token] = new
            state = self.link[state]
        self._last = new
        if state < 0:
            self.link[new] = 0
            return
        found = self.following[state][token]
        if self.length[found] == self.length[state] + 1:
            self.link[new] = found
            return
        # The shorter strings of the state that was found end here, too, and the longer ones do not: two states.
        shorter = self._state(dict(self.following[found]), self.length[state] + 1, self.ends[found])
        self.link[shorter] = self.link[found]
        self.link[found] = self.link[new] = shorter
        while state >= 0 and self.following[state].get(token) == found:
            self.following[state][token] = shorter
            state = self.link[state]

    def _state(self, following: dict[int, int], length: int, ends: int) -> int:
        self.following.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.ends.append(ends)
        return len(self.link) - 1
