"""The bundled models, each made by a training with its own recipe."""

import shlex
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from experiments.config.sections import plain
from experiments.training.blank import make_blank
from experiments.training.bundled import HYBRID, TARGET, install, target_for


def bundle(config: DictConfig) -> None:
    """Train and install the models that the configuration names."""
    out, work = Path(config.out), Path(config.work)
    blank = work / "blank"
    for name in plain(config, "models"):
        if name == TARGET and not (blank / "tokenizer.json").is_file():
            make_blank(blank, config.vocab_size, config.max_length)
        if not (work / name / "last").is_dir():
            own = blank if name == TARGET else out / (target_for(name) or TARGET)
            given = [f"recipe=bundled_{name}", f"out={work / name}", f"threads={config.threads}"]
            given += [f"target.name={own}"] if (own / "config.json").is_file() else []
            whose = target_for(name)
            given += [f"regenerate.file={work / 'responses.jsonl'}"] if whose == TARGET else []
            if whose == HYBRID and (kin := out / name.removeprefix(f"{HYBRID}_") / "config.json").is_file():
                given.append(f"head.name={kin.parent}")  # its recipe goes on from the target's drafter of this kind
            given += [str(word) for word in plain(config, "overrides")]
            given += ["resume=true"] if (work / name / "manifest.json").is_file() else []
            command = [sys.executable, "-m", "experiments.train", *given, f"hydra.run.dir={work / name}"]
            print(shlex.join(["python", *command[1:]]), flush=True)
            if subprocess.run(command).returncode:
                raise ValueError(f"the training of {name} ended early: see above; the same command goes on with it")
        install(name, work / name, out)
