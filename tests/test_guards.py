"""The guards of the structure: sizes of rooms and pages, circles of imports, questions about classes.

Every guard stands beside a counterexample that it rejects. A list of exceptions may only shrink: an entry that is no
longer needed fails, too.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from tests.test_imports import PACKAGES, ROOT, SOURCES, imports, parsed

ROOMS = tomllib.loads((ROOT / "tests" / "rooms.toml").read_text())


@cache
def python_files() -> dict[str, int]:
    """The lines of every Python file of the packages and the tests, by its path."""
    paths = [path for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths}


def in_room(file: str, patterns: Iterable[str]) -> bool:
    """Whether a file is of a room, which is given as folders, files, and ``folder/*.py`` for a folder's own files."""
    folder = file.rpartition("/")[0]
    return any(pattern in (file, f"{folder}/*.py") or file.startswith(f"{pattern}/") for pattern in patterns)


def distances(files: Mapping[str, int], rooms: Mapping[str, Any]) -> dict[str, int]:
    """How many lines every room has above its limit; negative where it has fewer."""
    sizes = {name: sum(files[file] for file in files if in_room(file, room["paths"])) for name, room in rooms.items()}
    return {name: size - rooms[name]["limit"] for name, size in sizes.items()}


def homeless(files: Iterable[str], rooms: Mapping[str, Any]) -> list[str]:
    """The files that are in no room but a whole package."""
    whole = [[package] for package in (*PACKAGES, "tests")]
    parts = [room["paths"] for room in rooms.values() if room["paths"] not in whole]
    undivided = ("drafters/", "verifiers/", "tests/")
    return [file for file in files if not (file.startswith(undivided) or any(in_room(file, each) for each in parts))]


def test_rooms_keep_their_size() -> None:
    """A room that is marked as above its limit loses the mark when it fits: marks may only go."""
    above = {name: lines for name, lines in distances(python_files(), ROOMS).items() if lines > 0}
    marked = {name for name, room in ROOMS.items() if room.get("above")}
    print("Lines above the limit:", ", ".join(f"{name} {lines}" for name, lines in above.items()) or "none")
    assert above.keys() == marked, "take something out, or take away the mark of a room that fits (tests/rooms.toml)"


def test_every_file_has_a_room_and_a_room_that_grows_is_noticed() -> None:
    assert homeless(python_files(), ROOMS) == []
    missing = [path for room in ROOMS.values() for path in room["paths"] if not any(ROOT.glob(path))]
    assert not missing, f"tests/rooms.toml names files that there are not: {missing}"
    rooms = {"verifiers": {"paths": ["verifiers"], "limit": 10}, "core": {"paths": ["specdec/types.py"], "limit": 5}}
    files = {"verifiers/a.py": 6, "verifiers/b.py": 5, "verifiers_of_others/c.py": 90, "specdec/types.py": 5}
    assert distances(files, rooms) == {"verifiers": 1, "core": 0}
    assert homeless(["specdec/types.py", "specdec/new.py", "verifiers/a.py"], rooms) == ["specdec/new.py"]


@cache
def texts() -> dict[str, str]:
    return {name: path.read_text() for name, path in SOURCES.items()}


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that every module imports, inside of functions and for type checkers alone included."""

    def module_of(name: str) -> str:
        return name if name in sources or "." not in name else module_of(name.rpartition(".")[0])

    named = {module: map(module_of, imports(source, module, typing=True)) for module, source in sources.items()}
    return {module: {name for name in names if name in sources} - {module} for module, names in named.items()}


def circle(graph: Mapping[str, set[str]]) -> set[str]:
    """Modules that import each other in a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle(import_graph(texts()))
    late, typing = "def f():\n    from a import x", "if TYPE_CHECKING:\n    from c import C"
    assert circle(import_graph({"a": "import b", "b": typing, "c": late, "d": "import a"})) == {"a", "b", "c"}


COMPONENTS = {
    "AttentionBackend", "Cache", "Drafter", "Executor", "Format", "LengthPolicy", "NodePolicy", "Recorder", "RoundCost",
    "Scheduler", "Scorer", "Session", "TreeBuilder", "Verifier",
}  # fmt: skip
"""The abstract classes that are extended; a question about a subclass of theirs is one about a component."""

ASKED = {
    "drafters.heads.block: Cache",  # its module is called with transformers' caches, too
    "drafters.heads.last_state: StaticTree",
    "experiments.measuring.conditions: Drafter",
    "experiments.session.policies: AdaptiveDrafter",
    "experiments.session.policies: CostAwareLength",
    "experiments.session.policies: CostAwareNodes",
    "experiments.session.policies: LengthPolicy",
    "experiments.session.policies: NodePolicy",
    "experiments.session.policies: ScoredDrafter",
    "specdec.engine.parts: Drafter",  # drafter and verifier were given in the wrong order
    "specdec.engine.recording: Verifier",  # rules within a rule, for the key of a recording
    "specdec.target.runner: InvariantExecutor",
}
"""Where the class of a component is asked for outside its room: ``module: class``."""


def classes_of(sources: Mapping[str, str]) -> dict[str, tuple[str, set[str]]]:
    """The module and the bases of every class of some sources, as their text says."""
    found = {}
    for module, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                found[node.name] = module, bases
    return found


def room_of(module: str) -> str:
    """The room of a module: a package of specdec or experiments, and drafters and verifiers as a whole."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in ("specdec", "experiments") else 1])


def asked(sources: Mapping[str, str], components: Iterable[str]) -> set[str]:
    """Where the class of a component is asked for outside its room, as ``module: class``."""
    classes, found = classes_of(sources), set()
    names = set(components) & classes.keys()
    while more := {name for name, (_, bases) in classes.items() if names & bases} - names:
        names |= more
    for module, source in sources.items():
        others = [name for name in imports(source, module, typing=True) if not name.startswith(PACKAGES)]
        foreign = {name.rpartition(".")[2] for name in others}
        for node in ast.walk(parsed(source)):
            kinds: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                kinds = [each for each in ast.walk(node.args[1]) if isinstance(each, ast.Name | ast.Attribute)]
            elif isinstance(node, ast.MatchClass):
                kinds = [node.cls]
            for kind in kinds:
                name = ast.unparse(kind).rpartition(".")[2]
                if name in names - foreign and room_of(classes[name][0]) != room_of(module):
                    found.add(f"{module}: {name}")
    return found


def test_nobody_outside_a_room_asks_for_the_class_of_its_components() -> None:
    assert asked(texts(), COMPONENTS) == ASKED
    sources = {
        "specdec.interfaces": "class Drafter(ABC):\n    def is_one(self, x): return isinstance(x, Drafter)",
        "drafters.a": "class A(Drafter): ...\nclass B(A): ...\nclass C(B): ...",
        "drafters.b": "isinstance(x, A)",
        "specdec.engine.engine": "isinstance(x, (int, a.B))\nmatch x:\n    case C(): ...",
    }
    assert asked(sources, ["Drafter"]) == {"specdec.engine.engine: B", "specdec.engine.engine: C"}


MOST_WORDS, MOST_PAGES, ALL_WORDS = 3_000, 16, 40_000
LONG = {"docs/drafters.md": 3_900, "docs/engine.md": 3_200, "docs/why-decoding-is-slow.md": 3_750}
"""Pages that are longer, and their own limits."""

BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
"""A block that shows a file: its title names it."""


def pages() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}


def words_of(text: str) -> int:
    """The number of words of a page: what has a letter in it, apart from the files that the page shows."""
    return sum(any(sign.isalpha() for sign in word) for word in BLOCK.sub("", text).split())


def with_files(text: str) -> str:
    """A page with the files that it shows as they are."""
    return BLOCK.sub(lambda block: block[0].replace(block[2], (ROOT / block[1]).read_text()), text)


def test_pages_keep_their_size_and_are_few() -> None:
    sizes = {name: words_of(text) for name, text in pages().items()}
    long = {name: words for name, words in sizes.items() if words > LONG.get(name, MOST_WORDS)}
    assert not long, f"these pages have more words than they may: {long}"
    short = [name for name in LONG if sizes.get(name, 0) <= MOST_WORDS]
    assert not short, f"these pages need no limit of their own: {short}"
    own = {name: text for name, text in pages().items() if not name.startswith("docs/api/")}
    words = words_of((ROOT / "README.md").read_text()) + sum(map(words_of, own.values()))
    assert len(own) <= MOST_PAGES and words <= ALL_WORDS
    asked = own["docs/index.md"]
    assert [name for name in own if f"({Path(name).name})" not in asked and name != "docs/index.md"] == []


def test_pages_show_files_as_they_are() -> None:
    wrong = [name for name, text in pages().items() if text != with_files(text)]
    assert not wrong, f"run python -m tests.test_guards: {wrong}"
    page = 'Two words.\n\n```toml title="tests/rooms.toml"\nx = 2\n```\n'
    assert words_of(page) == 2 and with_files(page) != page


if __name__ == "__main__":
    for page, content in pages().items():
        (ROOT / page).write_text(with_files(content))
