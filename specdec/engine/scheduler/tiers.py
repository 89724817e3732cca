"""A tier of batch work, which fills what real-time requests leave."""

from dataclasses import dataclass, field, replace
from math import inf

from specdec.arguments import whole
from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


@dataclass(eq=False, kw_only=True)
class Tiers(Ranked):
    """Serves real-time requests (``priority`` of 0 or lower) as if the others were not there.

    A batch request gets slots, pages and tokens that no real-time request wants, and gives them back when one comes.

    Attributes:
        batch_rows: The most batch requests in a round in which a real-time request takes part, because every row makes
            the round longer; None for any number.
        patience: Seconds of waiting after which a batch request is served like a real-time one; infinity for never.
    """

    preempts: bool = field(default=True, init=False)
    batch_rows: int | None = None
    patience: float = inf

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_rows = None if self.batch_rows is None else whole("batch_rows", self.batch_rows, least=0)
        self._above_zero("patience")

    def plan(self, view: View) -> Work:
        """Return the plan for both tiers, with few enough batch requests in the round."""
        work = self.by_rank(view, self.rank)
        batch = [request for request in work.decode if request.sampling.priority > 0]
        if self.batch_rows is None or len(batch) in (0, len(work.decode)):
            return work
        left_out = {request.id for request in sorted(batch, key=self.rank)[self.batch_rows :]}
        return replace(work, decode=[request for request in work.decode if request.id not in left_out])

    def rank(self, request: Request) -> tuple[float, int]:
        """Real-time requests in their order; batch requests behind them, or as if they had come ``patience`` later."""
        if request.sampling.priority <= 0:
            return request.arrived, request.id
        return request.arrived + self.patience if self.patience < inf else inf, request.id
