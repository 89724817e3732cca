"""First come, first served."""

from dataclasses import replace

from specdec.engine.scheduler.base import Scheduler, View, Work, entering, within_memory


class FirstCome(Scheduler):
    """Gives free slots to the requests that have waited longest, prefills a chunk of each new prompt, decodes the rest.

    A request whose last chunk is prefilled takes part in the round of the same turn. Nobody enters where somebody gives
    way.
    """

    def plan(self, view: View) -> Work:
        """Return a chunk for every new prompt, and a round for all."""
        stay, leave = within_memory(view, view.running)
        new = [] if leave else entering(view, view.waiting, stay)
        prefilling = [request for request in stay if request.to_prefill]
        chunks = [(request, min(view.prefill_chunk, request.to_prefill)) for request in (*prefilling, *new)]
        return Work(preempt=leave, prefill=chunks, decode=[*stay, *new])


class PrefillFirst(Scheduler):
    """Prefills as long as there is a prompt to prefill and a slot for it, and decodes only then.

    First tokens come soonest, and the running requests wait for it.
    """

    def plan(self, view: View) -> Work:
        """Return prefill alone, or a round for all."""
        work = FirstCome().plan(view)
        return replace(work, decode=()) if any(tokens for _, tokens in work.prefill) else work
