"""Replicas in processes that torchrun has started: the first process has the queue, the others have engines.

They find each other by torch.distributed, and talk by connections of ``multiprocessing``. All are on one machine, so
the moments that they note are on one clock.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch.distributed

from experiments.load.replicas import Here, Replicas, Sizes, There, in_words
from specdec.engine.engine import Engine

PAUSE = 0.002
"""Seconds that the queue waits for its replicas before it looks for arrivals again."""


@dataclass(frozen=True, kw_only=True)
class Lent:
    """What a process with engines tells the one with the queue, once.

    Attributes:
        methods: Each method, and whether it drafts, its exactness, and the number of its engine.
    """

    name: str
    tokenizer: Any
    device: str
    dtype: str
    engines: Sequence[Sizes]
    methods: Sequence[tuple[str, bool, str | None, int]]


def meet() -> list[Connection]:
    """Connect the first process with every other one; return its connections, or the other one's single one."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    first, others = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"]) - 1
    key = [os.urandom(16)]
    listener = Listener(authkey=key[0], backlog=others) if first else None
    shared = [None if listener is None else listener.address, key[0]]
    torch.distributed.broadcast_object_list(shared)
    if listener is None:
        return [Client(shared[0], authkey=shared[1])]
    with listener:
        return [listener.accept() for _ in range(others)]


def borrow(connections: Sequence[Connection], margin: int) -> tuple[Lent, list[Replicas]]:
    """Return what the other processes have, and their engines: one queue for each engine that every process has."""
    with in_words():
        lent: list[Lent] = [connection.recv() for connection in connections]

    def queue(number: int, sizes: Sizes) -> Replicas:
        those = [There(connection, number) for connection in connections]
        return Replicas(those, sizes, margin=margin, pause=lambda: wait(connections, PAUSE))

    return lent[0], [queue(number, sizes) for number, sizes in enumerate(lent[0].engines)]


def lend(connection: Connection, lent: Lent, engines: Sequence[Engine]) -> None:
    """Decode what the process with the queue asks for, until it hangs up."""
    connection.send(lent)
    replicas = [Here(engine) for engine in engines]
    while True:
        while not any(each.unfinished for each in replicas) or connection.poll():
            try:
                number, what, *values = connection.recv()
            except (EOFError, OSError):
                return
            if what == "counts":
                connection.send((number, replicas[number].page_counts))
            else:
                getattr(replicas[number], what)(*values)
        for number, each in enumerate(replicas):
            if each.unfinished:
                connection.send((number, each.step()))
