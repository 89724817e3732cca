"""Errors of the command line: one sentence, no traceback, and an exit code."""

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from experiments.config import ranks
from experiments.config.checking import did_you_mean
from experiments.config.completion import completing, pass_flags_on
from experiments.config.overrides import without_nulls
from experiments.config.sections import CONF
from experiments.config.words import overrides_first
from specdec.origin import at, own_place, place

ERROR = "error.txt"
"""The file that a sweep's job leaves in its folder when it fails."""
_FULL = "HYDRA_FULL_ERROR"
_EXTRAS = {
    "hydra/sweeper/optuna": "optuna",
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
    "hydra/launcher/ray": "ray",
}
"""Options that a package of its own brings, and the extra that installs it."""
_shown: list[str] = []  # the errors of this process


def launch(
    task: Callable[[DictConfig], Any],
    config_name: str,
    objective: Callable[[DictConfig, Any], float | None] | None = None,
) -> None:
    """Run a task as a Hydra application.

    An error is shown when it happens, and a sweep goes on with its next job. ``HYDRA_FULL_ERROR=1`` shows errors
    with tracebacks instead, and stops at the first. Exits with 1 after an error and with 130 after Ctrl-C. Components
    may come from modules in the working directory, also where a console script was called.

    Args:
        task: What to do with a composed configuration.
        config_name: Name of the primary configuration.
        objective: What a sweeper that searches for the best setting is told about a job, from its configuration and
            the task's result.
    """
    tracebacks = os.environ.get(_FULL) == "1"
    _shown.clear()

    @wraps(task)  # Hydra reads the task's module and name
    def job(config: DictConfig) -> float | None:
        _import_from(HydraConfig.get().runtime.cwd)  # a launcher may have started another process
        _note(None)
        try:
            with ranks.in_silence(), ranks.taking_part(config):
                result = task(config)
            return objective(config, result) if objective is not None else None
        except Exception as error:
            _note(error)
            if tracebacks:
                raise
            show(error)
            return None

    completes = completing(sys.argv[1:])
    sys.argv[1:] = pass_flags_on(sys.argv[1:]) if completes else overrides_first(sys.argv[1:])
    _import_from(os.getcwd())
    application = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)
    os.environ[_FULL] = "1"  # else Hydra prints what is wrong with a configuration in its own way, and exits
    try:
        sys.argv[1:] = ranks.arguments(without_nulls(sys.argv[1:]))
        application()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has seen enough, as in --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end
        sys.exit(0)
    except Exception as error:
        if tracebacks:
            raise
        if completes:
            sys.exit(1)  # in silence: the user is in the middle of typing
        show(error)
    finally:
        if not tracebacks:
            del os.environ[_FULL]
    if _shown:
        sys.exit(1)


def rewrite_command_line(rewrite: Callable[[list[str]], list[str]]) -> None:
    """Replace the words of the command line, such as a short form by the long one; an error ends the process.

    Args:
        rewrite: Takes the words without the program's name and returns those that Hydra reads, or raises ValueError.
    """
    try:
        sys.argv[1:] = rewrite(sys.argv[1:])
    except ValueError as error:
        show(error)
        sys.exit(1)


def show(error: BaseException) -> None:
    """Print an error as one sentence. ``launch`` then ends with exit code 1."""
    _shown.append(ranks.whose(ranks.explained(error) or sentence(error)))
    ranks.let_the_first_speak()
    print(f"error: {_shown[-1]}", file=sys.stderr)


def _import_from(folder: str) -> None:
    """Make modules of a folder importable, after all others: ``python -m`` does it, and a console script does not."""
    if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
        sys.path.append(folder)


def _note(error: BaseException | None) -> None:
    """Leave a failed job's error in its folder; None removes that of an earlier attempt.

    A launcher may run a job in another process or on another machine, from which only files come back.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return
    path = Path(hydra_config.runtime.output_dir) / ERROR
    if error is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{sentence(error)}\n\n{''.join(traceback.format_exception(error))}", encoding="utf-8")


def sentence(error: BaseException) -> str:
    """What went wrong, on one line.

    The message of an error about input is enough. Any other error is a bug or a failure of the machine: the sentence
    names its type, the line that it came from, and how to see the way there. If the error passed the user's own code
    (a drafter, a rule, a dataset, …), the line is there, and it is named for every kind of error.
    """
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file in _EXTRAS:
        return f"{error.missing_cfg_file} is not installed: pip install 'specdec[{_EXTRAS[error.missing_cfg_file]}]'"
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"there is no {group} {name!r}{did_you_mean(name, error.options)}"
    unknown = _unknown_key(error)
    if unknown is not None:
        return unknown
    message = error.msg if isinstance(error, SyntaxError) else str(error)  # the place stands at the end
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # Hydra and OmegaConf append the key and the type of its parent.
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "See https")))
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {text}"
    own = own_place(error)
    if isinstance(error, FileExistsError | NotADirectoryError | PermissionError) and own is None:
        return f"cannot use {str(error.filename)!r}: {error.strerror}"
    if isinstance(error, ValueError) or type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):
        return (text or type(error).__name__) + at(own)
    where = own or place(error)
    hint = f"{_FULL}=1 shows the whole traceback"
    return f"{type(error).__name__}: {text} ({f'at {where}; ' if where is not None else ''}{hint})"


def _unknown_key(error: BaseException) -> str | None:
    """A sentence with the nearest key that there is, where an override names one that there is not."""
    cause = error.__cause__
    if not isinstance(error, ConfigCompositionException) or not isinstance(
        cause, ConfigAttributeError | ConfigKeyError
    ):
        return None
    there, full = cause.parent_node, str(cause.full_key)
    if there is None:
        return None
    prefix = full.removesuffix(str(cause.key))
    known = [str(key) for key in there if key not in ("hydra", "_target_")]
    if not known:
        return f"{prefix.rstrip('.')} is empty: give '{prefix.rstrip('.')}={{{cause.key}:…}}'"
    sections = [name for name in known if OmegaConf.is_dict(there._get_node(name)) and cause.key in there[name]]
    if sections:  # temperature=1 for sampling.temperature=1
        return f"there is no {full}: did you mean {' or '.join(f'{prefix}{name}.{cause.key}' for name in sections)}?"
    return f"there is no {full}{did_you_mean(str(cause.key), known, prefix)}"
