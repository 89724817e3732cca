"""Runs a model so that a token's logits do not depend on what else is in the forward, bit for bit.

Kernels choose how they add numbers up by the shape of their inputs. So the nodes of a forward go through the model in
blocks of a fixed number of tokens, each token as a row of its own. Attention has one order (``attention/invariant``).
That a row of the block gets the same bits everywhere is tried (``target/invariance``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.call import AttentionBackend, View
from specdec.attention.facts import Facts
from specdec.attention.invariant import SingleTokens
from specdec.attention.logical_order import Nodes, Sight
from specdec.cache.storage import Cache
from specdec.execution.executor import Executor, inputs_of
from specdec.execution.packing import PackedLinears
from specdec.execution.recorder import UnrecordableError, recording_now
from specdec.forward import ForwardBatch, ForwardOutput, Wants
from specdec.topology import Topology

ROWS = 16
"""Tokens per block. More cost plain decoding more, fewer cost verification more, whose tree is cut into more blocks."""


class InvariantExecutor(Executor):
    """Runs every forward as blocks of single tokens; with ``optimize``, by packed weights on a CPU."""

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, *, optimize: bool):
        on_cpu = next(model.parameters()).device.type == "cpu"
        super().__init__(model, facts, backend, PackedLinears(model) if optimize and on_cpu else None)
        self.joins = False  # forwards: a token goes through the model by itself
        self.rows = ROWS  # tokens per block
        self.threads: int | None = None  # torch's, on a CPU: another number would divide the work at other places

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        if recording_now():
            raise UnrecordableError("the order of the keys is found by the host, forward by forward")
        nodes = Nodes(batch, cache)
        inputs = [each.flatten(0, 1) for each in inputs_of(batch, cache)]
        # Without logits the output layer is left out, of whole blocks.
        count = batch.nodes if batch.wants.logits is None else batch.wants.logits
        wanted = nodes.index >= batch.topology.width - count
        hidden: list[list[Tensor]] = []
        logits: list[Tensor] = []
        with self._threads(), self.weights():
            for start in range(0, len(nodes), self.rows):
                chosen = np.arange(start, min(start + self.rows, len(nodes)))
                scored = bool(wanted[chosen].any())
                wants = Wants(None if scored else 0, batch.wants.hidden_layers)
                outputs = self._block(batch, cache, nodes, chosen, inputs, wants)
                if scored:
                    logits.append(outputs.pop()[torch.from_numpy(wanted[chosen]).to(self.facts.device)])
                hidden.append(outputs)
        whole = [torch.cat(parts).unflatten(0, (batch.batch, batch.nodes)) for parts in zip(*hidden, strict=True)]
        if logits:
            whole.append(torch.cat(logits).unflatten(0, (batch.batch, count)))
        return ForwardOutput.of(batch.wants, whole)

    def _block(
        self, batch: ForwardBatch, cache: Cache, nodes: Nodes, chosen: np.ndarray, inputs: list[Tensor], wants: Wants
    ) -> list[Tensor]:
        """Return the wanted outputs of some nodes, at most ``rows``, in their order."""
        device, written, facts = batch.slots.device, len(chosen), self.facts
        # A slot comes once for each of its nodes, every time with another cell (but for padding behind prompts).
        slots, cells = (torch.from_numpy(each[chosen]).to(device) for each in (nodes.slots, nodes.cells))
        single = torch.zeros(written, 1, dtype=torch.long, device=device)
        cache.aim(ForwardBatch(tokens=single, slots=slots, lengths=cells, topology=Topology.chain(1, device)))
        self.recurrence.aim_block(batch, cache.states, chosen, rows=self.rows)
        filled = np.concatenate([chosen, np.repeat(chosen[-1:], self.rows - written)])
        index = torch.from_numpy(filled).to(device)
        sight = Sight(nodes.pieces(filled), nodes.positions[filled], facts.distinct_reaches, device)
        masks = [torch.zeros(self.rows, 1, 1, 1, dtype=facts.dtype, device=device) for _ in facts.distinct_reaches]
        rows = [input_.index_select(0, index)[:, None] for input_ in inputs]
        tokens = SingleTokens(cache, written, sight)
        outputs = self.call_model(wants, rows, View(cache, masks), tokens.attend, tokens.write)
        return [output[:written, 0] for output in outputs]

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Use the number of threads that the promise was tried with during the ``with`` block."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
