"""Commands: from the command line to the work, with one sentence per error, no traceback, and an exit code."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from experiments import removed
from experiments.config import ranks
from experiments.config.kinds import did_you_mean
from experiments.config.sections import CONF, check_pair, check_settings, in_sweep
from experiments.reporting import style
from specdec.origin import at, own_place, place

ERROR = "error.txt"
"""The file that a sweep's job leaves in its folder when it fails."""
RESULTS = ("summary.json", "load.json")
_FULL = "HYDRA_FULL_ERROR"
_TAKE_A_WORD = {
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun", "--config-path", "-cp"),
    *("--config-dir", "-cd", "--config-name", "-cn"),
}
"""Flags of Hydra whose value is the next word."""
_shown: list[str] = []  # the errors of this process


@dataclass(frozen=True)
class Command:
    """A command NAME: ``conf/NAME.yaml``, and a function of the same name as its module in ``experiments.commands``.

    Called with a configuration, it checks the settings, and only then imports what does the work. Whatever is wrong
    with its input is a ValueError of one sentence, which the functions of ``experiments.commands`` let through.

    Attributes:
        settings: The dataclass of its settings.
        rewrite: Puts the words of the command line into words that Hydra takes, or raises ValueError.
        objective: The figure of a job for a sweeper that searches for the best setting, from the job's configuration
            and result.
        divides: See ``ranks.taking_part``.
    """

    name: str
    settings: type
    rewrite: Callable[[list[str]], list[str]] | None = None
    objective: Callable[[DictConfig, Any], float | None] | None = None
    divides: bool = False

    def __call__(self, config: DictConfig) -> Any:
        """Do the work of a composed configuration, and return its result."""
        check_pair()
        check_settings(config, self.settings)
        return getattr(import_module(f"experiments.commands.{self.name}"), self.name)(config)

    def main(self, *first: str) -> None:
        """Run the command with the words of the command line, and others before them, as a Hydra application.

        An error is shown when it happens, and a sweep goes on with its next job. ``HYDRA_FULL_ERROR=1`` shows errors
        with tracebacks instead, and stops at the first. Exits with 1 after an error and with 130 after Ctrl-C.
        """
        tracebacks = os.environ.get(_FULL) == "1"
        _shown.clear()

        def run_job(config: DictConfig) -> float | None:
            if (folder := HydraConfig.get().runtime.cwd) not in sys.path:  # a launcher has started another process
                sys.path.append(folder)
            note = _note_of_job()
            style.TITLES.set(bool(config.get("title", True)))
            try:
                with ranks.taking_part(config, divides=self.divides):
                    result = self(config)
                return self.objective(config, result) if self.objective is not None else None
            except Exception as error:
                if note is not None:
                    way = "".join(traceback.format_exception(error))
                    note.write_text(f"{sentence(error)}\n\n{way}", encoding="utf-8")
                if tracebacks:
                    raise
                show(error)
                return None

        completes = completing(sys.argv[1:])
        sys.path.append(os.getcwd())  # as python -m does, and a console script does not
        application = hydra.main(version_base="1.3", config_path=str(CONF), config_name=self.name)(run_job)
        os.environ[_FULL] = "1"  # else Hydra prints what is wrong with a configuration in its own way, and exits
        try:
            if not completes:
                sys.argv[1:] = self._for_hydra([*first, *sys.argv[1:]])
            application()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:  # the reader has seen enough, as in --help | head
            # Or Python complains when it flushes at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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

    def _for_hydra(self, arguments: list[str]) -> list[str]:
        """The words of the command line as Hydra takes them."""
        for word in arguments:
            if (instead := removed.option(self.name, word)) is not None:
                raise ValueError(f"{word} is no longer there: {instead}")
        rewritten = arguments if self.rewrite is None else self.rewrite(arguments)
        flags = _flags(rewritten)  # Hydra's parser takes overrides in one piece only, before or behind its flags
        ordered = [rewritten[place] for place in sorted(range(len(rewritten)), key=flags.__contains__)]
        return ranks.arguments(with_home(ordered))


def show(error: BaseException) -> None:
    """Print an error as one sentence. ``Command.main`` then ends with exit code 1."""
    _shown.append(ranks.whose(sentence(error)))
    print(f"error: {_shown[-1]}", file=sys.stderr)


def sentence(error: BaseException) -> str:
    """An error on one line.

    The message of an error about input is enough. Any other error is a bug or a failure of the machine: the sentence
    names its type, the line that it came from, and how to see the way there. If the error passed the user's own code
    (a drafter, a rule, a dataset, …), the line is there, and it is named for every kind of error.
    """
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    composed = _of_composition(error)
    if composed is not None:
        return composed
    message = error.msg if isinstance(error, SyntaxError) else str(error)  # the place stands at the end
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # Hydra and OmegaConf append the key and the type of its parent.
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "See https")))
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {text}"
    own = own_place(error)
    if isinstance(error, OSError) and error.filename is not None and own is None:
        return f"cannot use {str(error.filename)!r}: {error.strerror}"
    if isinstance(error, ValueError) or type(error).__module__.split(".")[0] in ("hydra", "omegaconf"):
        return (text or type(error).__name__) + at(own)
    where = own or place(error)
    hint = f"{_FULL}=1 shows the whole traceback"
    return f"{type(error).__name__}: {text} ({f'at {where}; ' if where is not None else ''}{hint})"


def _of_composition(error: BaseException) -> str | None:
    """A sentence with the nearest name that there is, where an override names an option or key that there is not."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return None if error.options is None else f"there is no {group} {name!r}{did_you_mean(name, error.options)}"
    cause = error.__cause__
    if not (isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigAttributeError | ConfigKeyError)):
        return None
    there, full = cause.parent_node, str(cause.full_key)
    if there is None:
        return None
    prefix = full.removesuffix(str(cause.key))
    known = [str(key) for key in there if key not in ("hydra", "_target_")]
    if not known:
        return f"{prefix.rstrip('.')} is empty: give '+{prefix.rstrip('.')}={{{cause.key}:…}}'"
    sections = [name for name in known if OmegaConf.is_dict(there._get_node(name)) and cause.key in there[name]]
    if sections:  # temperature=1 for sampling.temperature=1
        return f"there is no {full}: did you mean {' or '.join(f'{prefix}{name}.{cause.key}' for name in sections)}?"
    return f"there is no {full}{did_you_mean(str(cause.key), known, prefix)}"


def _note_of_job() -> Path | None:
    """The file for the error of a sweep's job, if it fails; that of an earlier attempt is removed.

    A launcher may run a job in another process or on another machine, from which only files come back. None outside of
    a sweep, and where the folder has the results of a job that ended well, which stay what they are.
    """
    if not in_sweep():
        return None
    note = Path(HydraConfig.get().runtime.output_dir) / ERROR
    note.unlink(missing_ok=True)
    return None if any((note.parent / name).exists() for name in RESULTS) else note


# ---------------------------------------------------------------- words of the command line


def bare_words(arguments: Sequence[str]) -> list[int]:
    """The positions of bare words, which are neither ``name=value`` or ``~name`` nor a flag nor the value of one.

    In ``outputs/run --cfg job``, the first word is bare and ``job`` is not.
    """
    flags = _flags(arguments)
    words = enumerate(arguments)
    return [place for place, word in words if "=" not in word and not word.startswith("~") and place not in flags]


def with_folders(words: Sequence[str], name: str, *, several: bool = True) -> list[str]:
    """The words of a command line, with bare folders turned into an override: ``runs=[FOLDER]``.

    Args:
        name: The setting that takes the folders.

    Raises:
        ValueError: There are several folders, and the setting takes one.
    """
    bare = set(bare_words(words))
    folders, others = [], []
    for position, word in enumerate(words):
        (folders if position in bare or ("=" in word and Path(word).is_dir()) else others).append(word)
    if not folders:
        return others
    if not several and len(folders) > 1:
        raise ValueError(f"give one folder, not {len(folders)}: {' '.join(folders)}")
    # Quoted, as Hydra's grammar reads any text.
    quoted = ["'" + folder.rstrip("\\").replace("'", "\\'") + "'" for folder in folders]
    return [f"{name}=[{','.join(quoted)}]" if several else f"{name}={quoted[0]}", *others]


def with_home(words: Sequence[str]) -> list[str]:
    """``target.name=~/models`` with the user's home, which a shell puts only at the beginning of a word."""
    home = os.path.expanduser("~")
    return [re.sub(r"(?<=[=\[,:])~(?=/)", lambda _: home, word) if "=" in word else word for word in words]


def completing(arguments: Sequence[str]) -> bool:
    """Whether this call is a shell's question about a line that is not finished (``COMP_LINE``)."""
    asked = {"--shell-completion", "-sc"} & set(arguments) and any(word.startswith("query=") for word in arguments)
    return bool(asked) and "COMP_LINE" in os.environ


def _flags(arguments: Sequence[str]) -> set[int]:
    """The positions of Hydra's flags and of their values."""
    return {
        place
        for place, (before, word) in enumerate(zip(["", *arguments], arguments, strict=False))
        if word.startswith("-") or (before in _TAKE_A_WORD and not (before in ("--info", "-i") and "=" in word))
    }
