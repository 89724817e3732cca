"""A budget of tokens per turn, rounds first (chunked prefill; Sarathi-Serve, Agrawal et al. 2024, arXiv 2403.02310)."""

from specdec.arguments import whole
from specdec.engine.scheduler.base import Scheduler, View, Work


class TokenBudget(Scheduler):
    """Lets all requests decode that can, and fills the rest of a turn's budget with pieces of prompts.

    A decoding request counts as its root and the depth of its drafts. The prompt that came first is prefilled first.
    Running requests hence never wait for more than the budget's worth of prompt.

    Args:
        budget: Tokens per turn.
        least: Tokens of prompts that are prefilled in any turn that has some, so that a prompt is not held up for ever
            where rounds use up the budget.

    Raises:
        ValueError: A number is no count.
    """

    def __init__(self, budget: int = 512, *, least: int = 16):
        self.budget, self.least = whole("budget", budget, least=1), whole("least", least, least=1)

    def plan(self, view: View) -> Work:
        """Return a round for all that can decode, and as much of the prompts as the budget has room for."""
        decode = view.decoding
        left = max(self.budget - len(decode) * (1 + view.max_depth), self.least)
        chunks = []
        for request in (*view.prefilling, *view.entering):
            tokens = min(request.to_prefill, view.prefill_chunk, left)
            if request.to_prefill and not tokens:
                break
            chunks.append((request, tokens))
            left -= tokens
        return Work(prefill=chunks, decode=[*decode, *(request for request, _ in chunks)])
