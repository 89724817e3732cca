"""Well-known targets with their drafters: ``pair=llama31_8b_eagle3``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.config.sections import TABLES, choice

_GROUPS = ("target", "drafter")


def check_choices() -> None:
    """Refuse another target or drafter beside a pair, whose names would be given to it."""
    pair = choice("pair")
    if pair is None:
        return
    file = _file_of(pair)
    given: Any = TABLES["pair"].get(pair, {}) if file is None else OmegaConf.to_container(OmegaConf.load(file))
    for group, wanted in overrides_of(given).items():
        if choice(group) != wanted:
            raise ValueError(
                f"pair={pair} brings its own {group}, and {group}={choice(group)} is chosen beside it: leave "
                f"one out (target=hf target.name=… takes the pair's target for another drafter)"
            )


def overrides_of(pair: Mapping[str, Any]) -> dict[str, str]:
    """Returns which options of target and drafter a pair chooses, by group."""
    found: dict[str, str] = {}
    for entry in pair.get("defaults", ()):
        for key, option in entry.items() if isinstance(entry, dict) else ():
            group = str(key).removeprefix("override ").strip("/")
            if group in _GROUPS:
                found[group] = option
    return found


def check_files(config: DictConfig) -> None:
    """Refuse a pair whose files are neither on this machine nor to be had, before anything is loaded."""
    pair = choice("pair")
    if pair is not None:
        names = dict.fromkeys(config[group].get("name") for group in _GROUPS)
        check_reachable(pair, [name for name in names if name is not None])


def check_reachable(pair: str, names: Sequence[str]) -> None:
    """Look for the files of a pair, on this machine and on the hub.

    Raises:
        ValueError: The hub has to be asked, and cannot be reached or refuses.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    from experiments.results.revision import revision_of  # it imports the hub's client

    away = [name for name in names if revision_of(name) is None]
    for name in away:
        try:
            hf_hub_download(name, "config.json")  # the smallest file of a model
        except (GatedRepoError, RepositoryNotFoundError) as error:
            raise ValueError(
                f"pair={pair}: the hub has no {name} for you: accept its terms at huggingface.co/{name} and log in "
                f"with 'hf auth login', or correct the name"
            ) from error
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            commands = " and ".join(f"'hf download {each}'" for each in away)
            raise ValueError(
                f"pair={pair}: {' and '.join(away)} {'is' if len(away) == 1 else 'are'} not on this machine, and the "
                f"hub cannot be reached: download with {commands} where it can, or give folders as target.name=… "
                f"drafter.name=…"
            ) from error


def _file_of(pair: str) -> Path | None:
    """Returns the file of a pair, the user's own folders first; None if it is in none that is on disk."""
    sources: Any = HydraConfig.get().runtime.config_sources
    for source in sources:
        path = Path(source.path) / "pair" / f"{pair}.yaml"
        if source.schema == "file" and path.is_file():
            return path
    return None
