"""Where Hydra's configuration lives: ``conf/`` at the root of a clone, ``experiments/conf`` in an installed wheel."""

from pathlib import Path


def _find_conf() -> Path:
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train_bundled.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration beside {package}: reinstall the package, or run inside a clone")


CONF = _find_conf()
"""Absolute path of the configuration folder, for ``@hydra.main(config_path=str(CONF), …)``."""
