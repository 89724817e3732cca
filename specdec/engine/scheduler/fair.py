"""Fair shares for users: virtual token counters (Sheng et al. 2024, arXiv 2401.00588)."""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from specdec.engine.scheduler.base import Scheduler, View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


@dataclass(eq=False, kw_only=True)
class Fair(Ranked):
    """Gives free slots to the user (``SamplingParams.user``) who has been served least.

    A user's counter adds up the weighted tokens of the prompts that were admitted and of the outputs that were decoded
    for them. A user who comes back after having had no request waiting starts from the least counter of those who have
    some: nobody saves up service. Of two users who always have requests waiting, none is served more than the other by
    more than twice the largest prompt, or twice what a full batch decodes (the paper's bound).

    Attributes:
        prompt_weight: Weight of a prompt's token.
        output_weight: Weight of an output's token.
        served: The counter of every user.
    """

    preempts: bool = field(default=False, init=False)
    prompt_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("prompt_weight", "output_weight", most=1e9)
        self.served: defaultdict[str, float] = defaultdict(float)
        self._counted: list[tuple[Request, float]] = []  # the requests of the last turn, and what was counted of each
        self._asking: set[str] = set()

    def bind(self) -> Scheduler:
        """Return the same policy with counters of its own."""
        return replace(self)

    def plan(self, view: View) -> Work:
        """Count what was served since the last turn, and return the plan by the users' counters."""
        for request, before in self._counted:
            self.served[request.sampling.user] += self._service(request) - before
        asking = {request.sampling.user for request in view.waiting}
        # Who asks again begins at the least counter of those who went on asking, or where the last ones stopped.
        level = min((self.served[user] for user in asking & self._asking), default=None)
        if level is None:
            level = max((self.served[user] for user in self._asking), default=0.0)
        for user in asking - self._asking:
            self.served[user] = max(self.served[user], level)
        self._asking = asking or self._asking
        first = self._first(view)
        order = {request.id: place for place, request in enumerate((*view.running, *first))}
        work = self.by_rank(view, lambda request: order[request.id], first)
        self._counted = [(each, self._service(each)) for each in (*view.running, *first)]
        return work

    def _first(self, view: View) -> list[Request]:
        """Return as many waiting requests as there are free slots: one by one, that of the user served least."""
        own: defaultdict[str, deque[Request]] = defaultdict(deque)
        for request in view.waiting if view.free_slots else ():
            own[request.sampling.user].append(request)
        users = [(self.served[user], requests[0].id, user) for user, requests in own.items()]
        heapq.heapify(users)
        found = list[Request]()
        while users and len(found) < view.free_slots:
            served, _, user = heapq.heappop(users)
            found.append(own[user].popleft())
            if own[user]:
                served += self.prompt_weight * len(found[-1].prompt_ids) * (not found[-1].preemptions)
                heapq.heappush(users, (served, own[user][0].id, user))
        return found

    def _service(self, request: Request) -> float:
        """Return the weighted tokens of a request that count as served: of its prompt all, once it is admitted."""
        if request.slot < 0 and not request.preemptions:
            return 0.0
        prompt, output = len(request.prompt_ids) - request.reused, len(request.output_ids)
        return self.prompt_weight * prompt + self.output_weight * output
