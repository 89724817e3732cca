"""Prompts before rounds."""

from specdec.engine.scheduler.base import Scheduler, View, Work, admitted


class PrefillFirst(Scheduler):
    """Prefills as long as there is a prompt to prefill and a slot for it, and decodes only then.

    First tokens come soonest, and the running requests wait for it.
    """

    def plan(self, view: View) -> Work:
        """Return prefill alone, or a round for all."""
        decode, prefill, preempt = admitted(view)
        if any(tokens for _, tokens in prefill):
            decode = []
        return Work(preempt=preempt, prefill=prefill, decode=decode)
