"""Fair shares for users: virtual token counters (Sheng et al. 2024, arXiv 2401.00588)."""

import copy
from collections import defaultdict

from specdec.arguments import number
from specdec.engine.scheduler.base import Scheduler, View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


class Fair(Ranked):
    """Gives free slots to the user (``SamplingParams.user``) who has been served least.

    A user's counter adds up the weighted tokens that were prefilled and decoded for them. A user who comes back after
    having had no request starts from the least counter of those who have some: nobody saves up service. Of two users
    who always have requests waiting, none is served more than the other by more than a bound that the largest batch
    sets (theorem 4.4 of the paper).

    Args:
        budget: See ``Ranked``.
        least: See ``Ranked``.
        trims: See ``Ranked``.
        prompt_weight: Weight of a prompt's token.
        output_weight: Weight of an output's token.

    Attributes:
        served: The counter of every user.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        budget: int = 512,
        *,
        least: int = 16,
        trims: bool = False,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
    ):
        super().__init__(budget, least=least, trims=trims)
        self.prompt_weight, self.output_weight = (
            number("prompt_weight", prompt_weight), number("output_weight", output_weight),
        )  # fmt: skip
        if not (self.prompt_weight >= 0 and self.output_weight >= 0 and self.prompt_weight + self.output_weight > 0):
            raise ValueError(
                f"prompt_weight={prompt_weight}, output_weight={output_weight}: give weights from 0 on, not both 0"
            )
        self._begin()

    def _begin(self) -> None:
        self.served: defaultdict[str, float] = defaultdict(float)
        self._counted: dict[int, tuple[Request, float]] = {}  # running requests, and what was counted of each
        self._active: set[str] = set()

    def bind(self) -> Scheduler:
        """Return the same policy with counters of its own."""
        own = copy.copy(self)
        own._begin()
        return own

    def plan(self, view: View) -> Work:
        """Count what was served since the last turn, and return the plan by the users' counters."""
        self._count(view)
        ranks = {request.id: (-1.0, request.id) for request in view.running}
        ahead = dict(self.served)  # as if a user's requests that came earlier had been admitted
        for request in view.waiting:
            user = request.sampling.user
            ranks[request.id] = (ahead.setdefault(user, 0.0), request.id)
            ahead[user] += self.prompt_weight * request.to_prefill
        return self.by_rank(view, lambda request: ranks[request.id])

    def _count(self, view: View) -> None:
        for request, before in self._counted.values():
            self.served[request.sampling.user] += self._service(request) - before
        self._counted = {request.id: (request, self._service(request)) for request in (*view.running, *view.waiting)}
        active = {request.sampling.user for request, _ in self._counted.values()}
        level = min((self.served[user] for user in active & self._active), default=None)
        if level is not None:
            for user in active - self._active:
                self.served[user] = max(self.served[user], level)
        self._active = active

    def _service(self, request: Request) -> float:
        """Return the weighted tokens that a request has been served."""
        prompt = min(max(request.computed, request.prefilled), len(request.prompt_ids))
        return self.prompt_weight * prompt + self.output_weight * len(request.output_ids)
