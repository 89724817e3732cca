"""What drafters have in common that run a model of their own: a small causal LM, or a head."""

from transformers import PreTrainedModel

from drafters.heads.trained_on import TrainedOn
from specdec.arguments import flag, wholes
from specdec.cache.formats import check_format
from specdec.drafting.builders import ExpansionTree, TreeBuilder
from specdec.drafting.scored import ScoredDrafter
from specdec.interfaces import Sizes
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.types import DraftSampling


def layers_given(hidden_layers: object) -> tuple[int, ...] | None:
    """Returns the hidden states that a user asked for; None if none were.

    Raises:
        ValueError: They are no numbers.
    """
    remedy = "give the numbers of hidden states, such as [2, 16, 29]"
    return None if hidden_layers is None else wholes("hidden_layers", hidden_layers, remedy)


class OwnModelDrafter(ScoredDrafter):
    """Drafts with a model of its own. In its ``bind``, a subclass calls ``runner_for``.

    Args:
        tree: The tree builder.
        sampling: See ``ScoredDrafter``; None for ``"deterministic"`` with a tree of the most probable paths, and
            ``"iid"`` otherwise.
        temperature: See ``ScoredDrafter``.
        name: Shown in error messages.
        attention: See ``ModelRunner``.
        optimize: See ``ModelRunner``.
        kv_cache: See ``ModelRunner``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        tree: TreeBuilder,
        sampling: DraftSampling | str | None,
        temperature: float | None,
        *,
        name: str,
        attention: str,
        optimize: bool,
        kv_cache: str | None,
    ):
        if sampling is None:
            sampling = DraftSampling.DETERMINISTIC if isinstance(tree, ExpansionTree) else DraftSampling.IID
        super().__init__(tree, sampling, temperature)
        check_format(kv_cache)
        self.name, self.attention, self.kv_cache = name, attention, kv_cache
        self.optimize = flag("optimize", optimize)
        self.trained_on: TrainedOn | None = None

    def check_trained_on(self, target: Target) -> None:
        """Refuse another target than the one that the files name, which ``from_pretrained`` has noted.

        Raises:
            ValueError: It is another one.
        """
        if self.trained_on is not None:
            self.trained_on.check(self.name, target)

    def runner_for(self, model: PreTrainedModel, kind: str, sizes: Sizes, *, max_nodes: int) -> ModelRunner:
        """Return a runner of the model for one engine.

        Args:
            model: The model.
            kind: What it is, for messages: ``"head"`` or ``"drafter"``.
            sizes: The engine's sizes.
            max_nodes: The largest tree of a forward, the root not counted.

        Raises:
            ValueError: The model cannot be run. Names the drafter, because it would read as if the target were meant.
        """
        try:
            return ModelRunner(
                model,
                max_batch_size=sizes.max_batch_size,
                max_length=sizes.max_length,
                max_nodes=max_nodes,
                attention=self.attention,
                optimize=self.optimize,
                kv_cache=self.kv_cache,
            )
        except ValueError as error:
            raise ValueError(f"the {kind} {self.name}: {error}") from error
