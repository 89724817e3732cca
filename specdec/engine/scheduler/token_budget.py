"""A budget of tokens per turn, rounds first, prompts in the order in which they came."""

from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked


class TokenBudget(Ranked):
    """Lets all requests decode that can, and fills the rest of a turn's budget with pieces of prompts (see ``Ranked``).

    The prompt that came first is prefilled first. Running requests hence never wait for more than the budget's worth
    of prompt.
    """

    def plan(self, view: View) -> Work:
        """Return a round for all that can decode, and as much of the prompts as the budget has room for."""
        return self.by_rank(view, lambda request: request.id)
