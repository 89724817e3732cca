"""The import directions, read from the source: who may know whom; and public names, imported when they are used."""

import ast
import functools
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("specdec", "drafters", "verifiers", "experiments")

LAYERS = tomllib.loads((ROOT / "tests" / "layers.toml").read_text())
LEVEL = {
    f"{top}.{name}": level for top, layers in LAYERS.items() for level, names in enumerate(layers) for name in names
}
SEE_HYDRA = ("config", "session", "commands", "sweep")

# What a package may import of this project.
ALLOWED = {
    "specdec": {"specdec"},
    "drafters": {"specdec", "drafters"},
    "verifiers": {"specdec", "verifiers"},
    "experiments": set(PACKAGES),
}
ONLY_EXPERIMENTS = {"hydra", "omegaconf"}
ALIASES = {
    (f"experiments.{one}", f"experiments.{other}")
    for one, other in (("demo", "run"), ("check_drafter", "check"), ("check_verifier", "check"))
}
"""Commands that are another name of a command."""
ONLY_TRACKING = {"wandb": "experiments.tracking.wandb"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports(source: str, module: str = "m", *, typing: bool = False) -> frozenset[str]:
    """Absolute names that a source imports anywhere in it, as `package.module` or `package.module.name`."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and not typing and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import: write the whole name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # expressions import nothing
                visit(child)

    visit(parsed(source))
    return frozenset(found)


SOURCES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def whole_project() -> dict[str, frozenset[str]]:
    return {name: imports(path.read_text(), name, typing=True) for name, path in SOURCES.items()}


def is_entry_point(module: str) -> bool:
    """A module at the top of experiments, beside the rooms, or the one of a room that is a command, too."""
    parts = module.split(".")
    if parts[0] != "experiments":
        return False
    return parts[2:] == ["__main__"] or (len(parts) == 2 and SOURCES[module].name != "__init__.py")


def wrong_packages(module: str, found: Iterable[str]) -> list[str]:
    """The packages that a module imports and may not."""
    forbidden = set(PACKAGES) - ALLOWED[module.split(".")[0]]
    room = "".join(module.split(".")[1:2])
    if not (module.startswith("experiments") and (room in SEE_HYDRA or not room or is_entry_point(module))):
        forbidden |= ONLY_EXPERIMENTS
    forbidden |= {package for package, place in ONLY_TRACKING.items() if module != place}
    return [f"{module} imports {name}" for name in sorted({each.split(".")[0] for each in found} & forbidden)]


def wrong_layers(module: str, found: Iterable[str]) -> list[str]:
    """What a module of specdec or experiments imports and is not in a layer below its own, nor a room."""
    own, entry = ".".join(module.split(".")[:2]), is_entry_point(module)
    wrong = [] if own in LEVEL or entry else [f"{module} has no layer: give it one in tests/layers.toml"]
    for name in [name for name in sorted(found) if name.split(".")[0] == own.split(".")[0]]:
        other = ".".join(name.split(".")[:2])
        if other in (own, "experiments.removed") or (own, other) in ALIASES:
            continue  # a table of sentences; another name of a command
        above = len(LEVEL)  # of all layers
        if LEVEL.get(other, above) >= (above if entry else LEVEL.get(own, 0)):
            wrong.append(f"{module} imports {name}, which is in no lower layer: logic that is shared goes into a room")
    return wrong


def test_packages_the_core_and_the_experiments_are_layered() -> None:
    assert [wrong for module, found in whole_project().items() for wrong in wrong_packages(module, found)] == []
    running = {name: imports(SOURCES[name].read_text(), name) for name in SOURCES if name.startswith("specdec.")}
    running |= {name: found for name, found in whole_project().items() if name.startswith("experiments.")}
    assert [wrong for module, found in running.items() for wrong in wrong_layers(module, found)] == []
    missing = [name for name in LEVEL if name not in SOURCES]
    assert not missing, f"tests/layers.toml names {missing}, which there are not"
    for room in [name for name in LEVEL if name.startswith("experiments.")]:
        assert ast.get_docstring(parsed(SOURCES[room].read_text())), f"{room} has no docstring"


def test_wrong_directions_are_found() -> None:
    """The checks above on modules that do not obey; imports are found wherever they stand."""
    for source, expected in (
        ("import a.b as c", {"a.b"}),
        ("def f():\n    from hydra.utils import instantiate", {"hydra.utils.instantiate"}),
        ("try:\n    import x\nexcept ImportError:\n    import y", {"x", "y"}),
        ("if TYPE_CHECKING:\n    import x\nelse:\n    import y", {"y"}),
    ):
        assert imports(source) == expected
    assert wrong_packages("specdec.tree", {"drafters.model", "hydra.utils"})
    assert wrong_packages("experiments.run", {"wandb.sdk", "os"}) == ["experiments.run imports wandb"]
    assert wrong_layers("specdec.tree", {"specdec.engine.engine.Engine"})
    assert wrong_layers("specdec.tree", {"specdec"}), "the whole of it imports the module"
    assert wrong_layers("experiments.run", {"experiments.demo.demo"})
    assert wrong_layers("experiments.results.runs", {"experiments.config.sections.build"})
    assert wrong_layers("experiments.results.runs", {"experiments.datasets.prompt.Prompt"}), "of the same layer"
    assert not wrong_layers("experiments.run", {"experiments.config.launch.launch", "specdec.engine.engine.Engine"})


PUBLIC = ("specdec", "drafters", "verifiers")
HEAVY = {"torch", "transformers", "numpy", "scipy", "jaxtyping", "safetensors", "tokenizers", "huggingface_hub"}
HEAVY |= {*ONLY_EXPERIMENTS, *ONLY_TRACKING, "matplotlib", "pandas", "pyarrow"}


def test_names_are_imported_when_they_are_used_and_bring_no_more_than_they_need() -> None:
    """By what a fresh process has loaded after each of some pieces of code."""
    codes = (
        f"import {', '.join(PUBLIC)}; dir(specdec); specdec.__version__",
        "from specdec import DraftTree, SamplingParams, TreeShape, Verifier",
        "from verifiers import TypicalVerifier",
        "specdec.Engine",
    )
    whole = "import sys\n" + "".join(f"{code}\nprint(list(sys.modules))\n" for code in codes)
    done = subprocess.run([sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packages, contracts, rule, engine = (set(ast.literal_eval(line)) for line in done.stdout.splitlines())
    models = {"transformers.modeling_utils", "specdec.engine.engine", "drafters.model"}
    assert packages >= set(PUBLIC) and not packages & (HEAVY | models)
    assert "torch" in contracts and not contracts & models
    assert "verifiers.longest_path" in rule and not rule & {"verifiers.transport", "scipy", *models}
    assert "specdec.engine.engine" in engine and "verifiers.rejection" not in engine


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(importlib.import_module(value.__module__), name) is value
        assert vars(module)[name] is value, "the second access asks nobody"
    assert not hasattr(module, "Enigne")
