"""First come, first served."""

from specdec.engine.scheduler.base import Scheduler, View, Work, admitted


class FirstCome(Scheduler):
    """Gives free slots to the requests that have waited longest, prefills a chunk of each new prompt, decodes the rest.

    A request whose last chunk is prefilled takes part in the round of the same turn.
    """

    def plan(self, view: View) -> Work:
        """Return a chunk for every new prompt, and a round for all."""
        decode, prefill, preempt = admitted(view)
        return Work(preempt=preempt, prefill=prefill, decode=decode)
