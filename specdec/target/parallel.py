"""Tensor parallelism: every process of a group holds a share of each layer, and all compute one forward together.

transformers splits the model (``DistributedConfig``) and torchrun starts the processes. Every process runs the whole
program: the same prompts, the same rounds, the same drafter. ``Agreement`` keeps them in step.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from specdec.arguments import whole
from specdec.placement import is_shared
from specdec.quantization.checkpoint import stored_scheme
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Verdict

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for one that hangs. A process that ends is noticed at once."""


def check_processes(tensor_parallel: Any) -> int:
    """Return the number of processes that share the model; refuse a number that torchrun has not started.

    True stands for all processes. None, False and 1 mean that every process has the whole model.
    """
    started = wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor_parallel is not True:
        given = 1 if tensor_parallel is None or tensor_parallel is False else tensor_parallel
        wanted = whole("tensor_parallel", given, least=1, remedy="give the number of processes, or True")
        if wanted == 1:
            return 1
    missing = next((name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ), None)
    if wanted == 1 or wanted != started or missing is not None:
        there = f"{missing} is not set" if wanted == started > 1 else f"the number of processes is {started}"
        start = f"start the program with torchrun --nproc-per-node {max(wanted, 2)}"
        raise ValueError(f"tensor_parallel={tensor_parallel}: {there}; {start}")
    return wanted


def check_shares(config: PreTrainedConfig, size: int) -> None:
    """Refuse a model that cannot be split into so many equal shares."""
    if stored_scheme(config) is not None:
        raise ValueError("it is quantized by this project, which tensor_parallel cannot split: load its checkpoint")
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"transformers has no plan for splitting {text.model_type} models: leave tensor_parallel out")
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    for number, what in ((heads, "attention heads"), (kv_heads, "key-value heads")):
        if number is not None and number % size:
            raise ValueError(f"tensor_parallel={size} does not divide the model's {number} {what}: give a divisor")


def join(size: int) -> dict[str, Any]:
    """Make this process one of those that share a model; return the options for ``from_pretrained``."""
    if not torch.distributed.is_initialized():
        local = int(os.environ["LOCAL_RANK"])
        device = None
        if accelerator() == "cuda":
            if local >= (count := torch.cuda.device_count()):
                few = f"process {local} has no GPU of its own, because this machine has {count}"
                raise ValueError(f"tensor_parallel={size}: {few}; start as many processes as there are GPUs")
            torch.cuda.set_device(local)
            device = torch.device("cuda", local)
        backend = "nccl" if device is not None else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT, device_id=device)
    return {"distributed_config": DistributedConfig(tp_size=size)}


def group_of(model: Any) -> Any | None:
    """Return the group of processes that share a model; None for a model that this process has for itself."""
    if not is_shared(model):
        return None
    mesh = model._device_mesh
    return mesh.get_group("tp") if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh.get_group()


def accelerator() -> str:
    """Return the kind of device that every process has one of."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Agreement:
    """Keeps processes that share a model in step: what the first of them decides counts for all.

    All play the round with the same numbers, unless a kernel is not deterministic. One token of difference would give
    them trees of their own, and their next common forward would hang. So the first process sends the tree before it is
    verified, the verdict, and what the host is told.

    Args:
        group: The processes, a group of ``torch.distributed``; None for a model that this process has for itself.

    Attributes:
        shared: Whether other processes take part in every forward.
    """

    def __init__(self, group: Any | None = None):
        self.shared, self._group = group is not None, group
        self._leads = group is None or torch.distributed.get_rank(group) == 0

    def on_tree(self, tree: DraftTree, *, fixed: bool) -> DraftTree:
        """Return the trees that all processes verify. Laws and q stay a process's own.

        Unless the trees of all processes have ``fixed`` sizes, the first process sends its sizes first, and the others
        wait for these numbers.
        """
        if not self.shared:
            return tree
        width, depth, children = tree.width, tree.max_depth, tree.max_children
        if not fixed:
            sizes = torch.tensor([width, depth, children], device=tree.tokens.device)
            width, depth, children = self.on_numbers(sizes).tolist()
        mine = torch.stack([tree.tokens, tree.parents, tree.valid.long()])
        if self._leads:
            self.on_numbers(mine)
            return tree
        tokens, parents, valid = self.on_numbers(mine.new_empty(3, mine.shape[1], width))
        valid = valid.bool()
        if width != tree.width:
            return DraftTree.build(tokens, parents, valid=valid, max_depth=depth, max_children=children)
        topology = tree.topology
        if not (fixed and tree.is_static):
            topology = Topology.from_parents(parents, max_depth=depth, max_children=children)
        return replace(tree, tokens=tokens, topology=topology, valid=valid)

    def on_verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict that all processes commit; all numbers of a row travel together."""
        if not self.shared:
            return verdict
        names = ("num_accepted", "next_token", "valid", "expected_accepted")
        numbers = {name: getattr(verdict, name) for name in names}
        mine = torch.cat([verdict.path.double(), *[number.double()[:, None] for number in numbers.values()]], dim=1)
        path, *theirs = self.on_numbers(mine).split([verdict.path.shape[1], *[1] * len(numbers)], dim=1)
        agreed = {name: new[:, 0].to(old.dtype) for (name, old), new in zip(numbers.items(), theirs, strict=True)}
        return replace(verdict, path=path.to(verdict.path.dtype), **agreed)

    def on_numbers(self, numbers: Tensor) -> Tensor:
        """Return the first process's numbers or marks, for a tensor that has the same shape in all processes."""
        if not self.shared:
            return numbers
        marks = numbers.dtype is torch.bool
        sent = (numbers.long() if marks else numbers).clone(memory_format=torch.contiguous_format)
        torch.distributed.broadcast(sent, group=self._group, group_src=0)
        return sent.bool() if marks else sent
