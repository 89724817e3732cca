"""What is said of a drafter that was exported."""

from typing import Any

from experiments.exporting.kinds import DFLASH, DSPARK, EAGLE3, MEDUSA, MTP
from experiments.exporting.reading import Found


def facts_of(found: Found) -> str:
    """Returns a drafter's sizes and numbers, in one line."""
    module: Any = found.module
    parameters = list(module.parameters())
    told = [
        f"{sum(each.numel() for each in parameters):,} parameters in {str(parameters[0].dtype).removeprefix('torch.')}"
    ]
    if found.kind in (EAGLE3, DFLASH, DSPARK):
        layers = module.hidden_layers
        told.append("hidden states not named" if not layers else f"reads the inputs of layers {_listed(layers)}")
    if found.kind in (DFLASH, DSPARK):
        told.append(f"blocks of {module.config.block_size} places for {module.config.tokens} tokens")
        told.append(f"mask token {module.config.mask_token_id}")
    if found.kind == DSPARK and module.config.markov_rank:
        told.append(f"{module.config.markov_head_type} Markov head of rank {module.config.markov_rank}")
    ids = getattr(module, "draft_ids", None)
    if ids is not None:
        told.append(f"drafts {len(ids):,} of {module.config.vocab_size:,} tokens")
    if found.kind == MEDUSA:
        told.append(f"{module.num_heads} heads")
    if found.kind == MTP:
        told.append(f"reads the target's last state {'before' if module.before_norm else 'after'} its norm")
    return "; ".join(told)


def _listed(layers: tuple[int, ...]) -> str:
    *first, last = (str(layer) for layer in layers)
    return f"{', '.join(first)} and {last}" if first else last
