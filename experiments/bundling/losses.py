"""Training losses: next token, distillation of a small model, distillation of Medusa heads."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

Loss = Callable[[nn.Module, Int[Tensor, "row position"], float], Float[Tensor, ""]]


def next_token(model: nn.Module, tokens: Int[Tensor, "row position"], progress: float) -> Float[Tensor, ""]:
    """Cross entropy of each window's next tokens, in nats per token."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def distance(
    student_logits: Float[Tensor, "*rows vocab"], target_probs: Float[Tensor, "*rows vocab"], progress: float
) -> Float[Tensor, ""]:
    """The mean distance of the student from the target: forward KL at first, total variation at the end.

    One minus the total variation *is* the acceptance rate of rejection sampling (Leviathan et al. 2023,
    Theorem 3.5), and DistillSpec (Zhou et al. 2023, arXiv 2310.08461) finds that the choice of distance matters.
    But total variation gives almost no gradient while the student is far away, hence KL first.
    """
    log_q = F.log_softmax(student_logits.float(), dim=-1)
    cross_entropy = -(target_probs * log_q).sum(-1)
    entropy = -torch.xlogy(target_probs, target_probs).sum(-1)
    variation = 0.5 * (target_probs - log_q.exp()).abs().sum(-1)
    return ((1 - progress) * (cross_entropy - entropy) + progress * variation).mean()


def distillation(target: nn.Module) -> Loss:
    """A loss that draws a student model's next-token distribution towards ``target``'s."""

    def loss(student: nn.Module, tokens: Int[Tensor, "row position"], progress: float) -> Float[Tensor, ""]:
        with torch.no_grad():
            target_probs = target(input_ids=tokens[:, :-1]).logits.float().softmax(-1)
        return distance(student(input_ids=tokens[:, :-1]).logits, target_probs, progress)

    return loss


def medusa_distillation(target: PreTrainedModel, *, decay: float = 0.8) -> Loss:
    """A loss that draws head i's output at position t towards the target's distribution of token t+2+i.

    The target's distribution there (given the text up to t+1+i) is what the published recipe's one sampled token
    estimates: the same expected gradient, with less noise. Head i weighs ``decay ** i`` (section 2.2.1 of the
    paper).
    """
    output_layer = target.get_output_embeddings()
    assert output_layer is not None, "a causal LM has one"

    def loss(heads: nn.Module, tokens: Int[Tensor, "row position"], progress: float) -> Float[Tensor, ""]:
        with torch.no_grad():
            hidden = target.base_model(input_ids=tokens[:, :-1]).last_hidden_state
            target_probs = output_layer(hidden).float().softmax(-1)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(next(heads.parameters()).dtype)  # the target is in bfloat16, the heads in float32
        logits = heads(hidden)
        total = logits.new_zeros(())
        for index, head_logits in enumerate(logits):
            ahead = index + 1
            total = total + decay**index * distance(head_logits[:, :-ahead], target_probs[:, ahead:], progress)
        return total

    return loss
