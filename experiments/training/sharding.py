"""A head over several processes, each of which keeps a part of its weights, gradients and optimizer states (FSDP).

The head is one unit: its weights are whole from the beginning of a forward to the end of the backward pass, and in
parts in between. torch's ``fully_shard`` does it, on any device: accelerate's own FSDP leaves out CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

SHARDED: type = DTensor  # of a tensor that is in parts


def check_processes(accelerator: Accelerator, *, sharded: bool, muon: bool = False) -> None:
    """Refuse what cannot be divided, and accelerate's own way of dividing."""
    if accelerator.distributed_type is DistributedType.FSDP:
        raise ValueError("accelerate was told to use its own FSDP: leave that out, and give sharded=true")
    if sharded and accelerator.num_processes == 1:
        raise ValueError(
            "sharded=true divides the head among processes, and there is one: start with torchrun --standalone "
            "--nproc_per_node=2 -m experiments.train …"
        )
    if sharded and muon:
        raise ValueError("fit.muon_lr: Muon needs whole matrices, which sharded=true divides: give fit.muon_lr=null")


def divide(module: nn.Module, accelerator: Accelerator) -> None:
    """Let every process keep a part of a module's weights; all must begin with the same ones."""
    fully_shard(module, mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))


@contextmanager
def undivided(module: nn.Module) -> Iterator[None]:
    """Give a module plain weights for as long as the context lasts; nothing may be trained in it.

    All processes must enter it together. A module that is not divided stays as it is.
    """
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, SHARDED)
    ]
    plain = {id(parameter): nn.Parameter(gathered(parameter), parameter.requires_grad) for _, _, parameter in found}
    try:
        for owner, name, parameter in found:
            setattr(owner, name, plain[id(parameter)])
        yield
    finally:
        for owner, name, parameter in found:
            setattr(owner, name, parameter)


def gathered(state: Any) -> Any:
    """Returns a tensor, or a dict or list of some at any depth, with whole tensors in place of parts."""
    return tree_map(lambda part: part.detach().full_tensor() if isinstance(part, SHARDED) else part, state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state of whole tensors into an optimizer, whose parameters may be divided."""
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
