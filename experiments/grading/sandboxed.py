"""The process in which a program that a model wrote runs. Started by its path; needs the standard library only.

It reads a job from standard input, gives up what it may do, runs the program, and writes two lines to standard output:
how it is shut off, and how the program ended. The second line is missing if the program ended the process.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

_FILE_BYTES = 16 * 2**20
_OPEN_FILES = 64
_NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000  # user, network, interprocess communication
_PARENT_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill", "subprocess.", "socket.", "pty.", "ctypes.")
_CHANGING = {"os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.utime", "shutil.rmtree"}
_CHANGING_TWO = {"os.rename", "os.link", "os.symlink"}


def main() -> None:
    """Run the job on standard input."""
    job: dict[str, Any] = json.load(sys.stdin.buffer)
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    try:
        cut_off = shut_off(job["seconds"], job["memory"])
    except (OSError, ValueError) as error:
        _say(results, {"refused": f"{type(error).__name__}: {error}"})
        os._exit(1)
    _say(results, {"no_network": cut_off})
    if job["guard"]:
        sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    error = attempt(job["program"])
    _say(results, {"done": job["token"], "error": error})
    os._exit(0)  # not the program's own threads and exit handlers


def shut_off(seconds: int, memory: int) -> bool:
    """Give up privileges, and limit what is left; whether the network is out of reach, too.

    Raises:
        OSError: Something could not be given up, and running foreign code would not be safe.
    """
    system = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        # No limit on processes holds for root. The id is nobody's, so that no other process counts.
        nobody = 60000 + os.getpid() % 5000
        os.chown(".", nobody, nobody)
        _keep_modules_in_reach()
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
        system.prctl(_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root from here on
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    cut_off = system.unshare(_NEW_NAMESPACES) == 0
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, _FILE_BYTES, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),  # no further process, and no thread
    ):
        resource.setrlimit(kind, (soft, hard))
    return cut_off


def _keep_modules_in_reach() -> None:
    """Let ``import`` find its folders by open descriptors: root's Python may lie in a home that only root may enter."""
    opened = {place: os.open(place, os.O_PATH | os.O_DIRECTORY) for place in sys.path if os.path.isdir(place)}

    def moved(path: str) -> str:
        for place, number in opened.items():
            if path == place or path.startswith(place + os.sep):
                return f"/proc/self/fd/{number}{path.removeprefix(place)}"
        return path

    sys.path[:] = [moved(place) for place in sys.path]
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):  # a package: its modules are looked for in the folder where it was found
            module.__path__ = [moved(path) for path in module.__path__]
    sys.path_importer_cache.clear()


def guard(folder: str) -> Any:
    """A hook that refuses processes, sockets and changes outside a folder: against accidents, not against malice."""

    def inside(path: Any) -> bool:
        if isinstance(path, int):
            return True  # open already
        place = os.path.realpath(os.fsdecode(path))
        return place == os.devnull or place == folder or place.startswith(folder + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            allowed = not (flags or 0) & _WRITING or inside(path)
        elif event in _CHANGING:
            allowed = inside(arguments[0])
        elif event in _CHANGING_TWO:
            allowed = inside(arguments[0]) and inside(arguments[1])
        else:
            allowed = not event.startswith(_REFUSED)
        if not allowed:
            raise PermissionError(f"{event} is not allowed here")

    return hook


def attempt(program: str) -> str | None:
    """Run the program; None if it comes to its end, else what went wrong, in one line."""
    try:
        # Not __main__: what a module does when it is started is not asked for.
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the tests behind it have not run
        try:
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        except BaseException:
            return "an error that cannot be shown"
    return None


def _say(results: int, what: dict[str, Any]) -> None:
    os.write(results, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
