"""ReDrafter: a recurrent head on the target's last state drafts beams (Cheng et al. 2024, arXiv 2403.09919)."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from drafters.heads.assemble import fill, needed
from drafters.heads.bound import rows_of
from drafters.heads.files import Checkpoint, write
from drafters.heads.last_state import Heads, LastStateDrafter, PathScorer, TrainedHeads
from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch
from drafters.medusa import ResidualBlock
from specdec import Sizes, Target
from specdec.arguments import flag, whole
from specdec.drafting.builders import AnyTree, BeamSearchTree


class RecurrentHead(Heads):
    """A head that carries a state down a path, and predicts a token from the target's last state and its own.

    Its state is s ← SiLU(W e + U s + b) for the embedding e of each token from the root on, beginning at zero; without
    ``rnn`` it is their sum. The logits are an output layer's after residual blocks over both states side by side
    (section 3.1). Modules have the names of the published code (apple/ml-recurrent-drafter).

    Residual blocks are ``exit_size`` wide, by default twice the target's, which needs no projection.
    """

    least_layers = 0

    def __init__(self, *, rnn: bool = True, exit_size: int | None = None, **sizes: Any):
        super().__init__(num_heads=1, **sizes)
        width, self.rnn = self.hidden_size, flag("rnn", rnn)
        self.exit_size = 2 * width if exit_size is None else whole("exit_size", exit_size, least=1)
        self.input_proj = None if self.exit_size == 2 * width else nn.Linear(2 * width, self.exit_size)
        blocks = [ResidualBlock(self.exit_size) for _ in range(self.num_layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(self.exit_size, self.vocab_size, bias=False))
        if rnn:
            self.rnn_u, self.rnn_w = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    @property
    def max_depth(self) -> None:
        """None: it goes on as long as it is asked."""
        return None

    def output(self, depth: int) -> Any:
        layers: Any = self.lm_head
        return layers[-1]

    def begin_as(self, output: nn.Linear) -> None:
        for parameter in self.parameters():
            parameter.zero_()
        if self.rnn:
            nn.init.eye_(self.rnn_w.weight)
        if self.input_proj is not None:
            nn.init.eye_(self.input_proj.weight)
        shared = min(self.exit_size, self.hidden_size)
        self.output(1).weight[:, :shared] = rows_of(output)[:, :shared]

    def state(self, embeds: Float[Tensor, "*rows hidden"], above: Tensor | None) -> Float[Tensor, "*rows hidden"]:
        if not self.rnn:
            return embeds if above is None else embeds + above
        before = self.rnn_u.bias if above is None else self.rnn_u(above)
        return nn.functional.silu(self.rnn_w(embeds) + before)

    def features(self, hidden: Float[Tensor, "*rows hidden"], state: Float[Tensor, "*rows hidden"]) -> Tensor:
        """What the output layer reads."""
        joined = torch.cat([hidden, state], dim=-1)
        return self.lm_head[:-1](joined if self.input_proj is None else self.input_proj(joined))

    def forward(
        self,
        hidden: Float[Tensor, "*rows hidden"],
        embeds: Float[Tensor, "*rows hidden"],
        above: Float[Tensor, "*rows hidden"] | None = None,
    ) -> tuple[Float[Tensor, "*rows vocab"], Float[Tensor, "*rows hidden"]]:
        state = self.state(embeds, above)
        return self.lm_head[-1](self.features(hidden, state)), state

    def widened(self, hidden_size: int) -> "RecurrentHead":
        return self

    def save_pretrained(self, path: str | Path) -> None:
        config = {
            "model_type": "recurrent_drafting_drafter",
            "hidden_size": self.hidden_size,
            "exit_dim": self.exit_size,
            "num_draft_layers": self.num_layers,
            "rnn": self.rnn,
            "vocab_size": self.vocab_size,
            "base_model_name_or_path": self.base_model,
        }
        write(path, self.state_dict(), config)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "RecurrentHead":
        name, tensors = checkpoint.name, checkpoint.tensors()
        parts = [key.split(".") for key in tensors]
        layers = 1 + max(
            (int(part[1]) for part in parts if part[0] == "lm_head" and part[2:3] == ["linear"]), default=-1
        )
        vocab_size, exit_size = needed(name, tensors, f"lm_head.{layers}.weight").shape
        projection = tensors.get("input_proj.weight")
        with torch.device("meta"):
            head = cls(
                rnn="rnn_w.weight" in tensors or "rnn_u.weight" in tensors,
                exit_size=exit_size,
                hidden_size=(exit_size if projection is None else projection.shape[1]) // 2,
                vocab_size=vocab_size,
                num_layers=layers,
                base_model=checkpoint.config.get("base_model_name_or_path") or "",
            )
        return fill(name, head, tensors)


class RecurrentScorer(PathScorer):
    """Scores with the node's own state, which is all that is known of its path."""

    def step(self, hidden: Tensor, embeds: Tensor, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self.heads(hidden.expand(-1, embeds.shape[1], -1), embeds, above)


class ReDrafter(LastStateDrafter):
    """Drafts what a beam search finds, as ``DETERMINISTIC``: verified as if drawn, as published, it is biased."""

    kind, title = RecurrentHead, "ReDrafter"

    @classmethod
    def usual_tree(cls, heads: Any) -> AnyTree:
        """Return ten beams of four tokens."""
        return BeamSearchTree()

    def scorer(self, heads: Any, target: Target, sizes: Sizes) -> RecurrentScorer:
        return RecurrentScorer(
            embed=target.model.get_input_embeddings(),
            max_shown=self.tree.max_shown,
            width=heads.hidden_size,
            **self.placed(heads, target, sizes),
        )


class TrainedRecurrent(TrainedHeads):
    """A ``RecurrentHead``, which reads the text's own tokens. The other arguments: see ``TrainedHeads``."""

    title, made = "ReDrafter head", ReDrafter

    def __init__(
        self,
        *,
        name: str | None = None,
        depths: int = 5,
        num_layers: int = 1,
        rnn: bool = True,
        exit_size: int | None = None,
    ):
        super().__init__(name=name, depths=depths, num_layers=num_layers)
        self.options: dict[str, Any] = {"rnn": rnn, "exit_size": exit_size}

    def settings(self, target: Target) -> dict[str, Any]:
        return self.options

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        previous = batch.tokens.flatten()[anchors.places(batch)]
        hidden, state, found = states.before(anchors).float(), None, []
        for tokens in previous.unbind(1):
            state = self.head.state(self._embed[0](tokens), state)
            found.append(self.head.features(hidden, state))
        return Prediction(found)
