"""Make the bundled models: ``python -m experiments.bundle``.

Every model is a training of ``experiments.train`` with its own recipe (``conf/recipe/bundled_*.yaml``): first the
target, on the standard library's sources, and then drafters for it. Each command is printed. A finished training in
``work`` is not run again, and an interrupted one goes on; the weights are installed in ``out`` with a card and
checksums.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early, plain
from experiments.config.settings import BUNDLE


def bundle(config: DictConfig) -> None:
    """Train and install the models that the configuration names.

    Raises:
        ValueError: A training or an installation failed.
    """
    check_early(config, BUNDLE)
    from experiments.training.blank import make_blank
    from experiments.training.bundled import TARGET, install

    out, work = Path(config.out), Path(config.work)
    blank = work / "blank"
    for name in plain(config, "models"):
        if name == TARGET and not (blank / "tokenizer.json").is_file():
            make_blank(blank, config.vocab_size, config.max_length)
        if not (work / name / "last").is_dir():
            own = blank if name == TARGET else out / TARGET
            given = [f"recipe=bundled_{name}", f"out={work / name}", f"threads={config.threads}"]
            given += [f"target.name={own}"] if (own / "config.json").is_file() else []
            given += [] if name == TARGET else [f"regenerate.file={work / 'responses.jsonl'}"]
            given += [str(word) for word in plain(config, "overrides")]
            given += ["resume=true"] if (work / name / "manifest.json").is_file() else []
            command = [sys.executable, "-m", "experiments.train", *given, f"hydra.run.dir={work / name}"]
            print(shlex.join(["python", *command[1:]]), flush=True)
            if subprocess.run(command).returncode:
                raise ValueError(f"the training of {name} ended early: see above; the same command goes on with it")
        install(name, work / name, out)


def main() -> None:
    """Make the bundled models."""
    launch(bundle, "bundle")


if __name__ == "__main__":
    main()
