"""The target's first layers as a scorer, over the keys and values that the target itself has of them."""

from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.model_scorer import LAST
from specdec.drafting.scorer import Logits, Scorer, forward_of
from specdec.target.runner import ModelRunner
from specdec.topology import Topology


class ExitScorer(Scorer):
    """Scores with the target's first layers, whose output goes to its own output layer (early exit).

    What these layers have stored of committed tokens is in the target's cache, so that nothing is prefilled, committed
    or kept. Those of drafted nodes are written to the places where verification writes the same ones.
    """

    lookback = 0

    def __init__(self, runner: ModelRunner):
        self.model = self.runner = runner
        self._root = Topology.chain(1, runner.device)

    def prepare(self, batch: Batch) -> int:
        return self.runner.version

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        return self.runner.run(forward_of(batch, batch.roots[:, None], self._root, wants=LAST)).scores

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        return self.runner.run(forward_of(batch, tokens, topology)).scores
