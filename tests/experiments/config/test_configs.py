"""Every YAML composes, and what it names can be made."""

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from experiments.config import settings
from experiments.config.checking import check_arguments
from experiments.config.sections import CONF, bootstrap_of, build, plain, typed
from experiments.config.settings import EngineSettings, TrainSettings
from experiments.contenders.base import OtherEngine
from experiments.results.statistics import Bootstrap
from experiments.training.data.document import Source
from experiments.training.data.regenerate import RegenerateConfig
from experiments.training.heads.base import TrainedHead
from experiments.training.losses import Loss
from experiments.training.weights import Weights
from specdec import bundled
from specdec.drafting.builders import StaticTree
from specdec.drafting.policies import LengthPolicy, NodePolicy
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import TreeShape

YAML = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
OPTIONS = [(path.parent.as_posix(), path.stem) for path in YAML if len(path.parts) == 2 and path.parts[0] != "pair"]
"""Pairs need files that are on the hub: tests/experiments/config/test_pairs.py makes them with stand-ins."""
APPLICATIONS = [path.stem for path in YAML if len(path.parts) == 1]
# What a file leaves to the user.
NEEDED = {
    ("target", "hf"): ["target.name={models}/target"],
    ("dataset", "text"): ["dataset.files={conf}/run.yaml"],
    ("dataset", "jsonl"): ["dataset.file={tmp}/prompts.jsonl"],
    ("dataset", "spec_bench"): ["dataset.file={tmp}/prompts.jsonl"],
    ("dataset", "mt_bench"): ["dataset.file={tmp}/prompts.jsonl"],
    # These have a file on the hub, where no test goes.
    ("dataset", "humaneval"): ["dataset.file={tmp}/prompts.jsonl"],
    ("dataset", "mbpp"): ["dataset.file={tmp}/prompts.jsonl"],
    ("dataset", "gsm8k"): ["dataset.file={tmp}/prompts.jsonl"],
    ("data", "text"): ["data.files={conf}/run.yaml"],
    ("data", "chat"): ["data.file={tmp}/prompts.jsonl"],
    ("regenerate", "target"): ["regenerate.file={tmp}/answers.jsonl"],
}
TRAINING: dict[str, type] = {
    "head": TrainedHead,
    "loss": Loss,
    "weights": Weights,
    "data": Source,
    "regenerate": RegenerateConfig,
    "recipe": object,
}
"""Groups of ``experiments.train``, and what their options are."""
# Where tiny models stand in for what these name.
LOCAL = {
    ("target", "bundled"): ["target.name={models}/target"],
    ("drafter", "model"): ["drafter.name={models}/drafter"],
    ("drafter", "medusa"): ["drafter.name={models}/medusa"],
    ("drafter", "eagle"): ["drafter.name={models}/eagle"],
    ("drafter", "block"): ["drafter.name={models}/block"],
    ("drafter", "choice"): ["drafter.model.name={models}/drafter"],
    ("drafter", "merged"): ["drafter.model.name={models}/drafter"],
    ("contender", "hf_assisted"): ["contenders.hf_assisted.assistant={models}/drafter"],
}

Configure = Callable[..., DictConfig]


def filled(overrides: list[str], models: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    return [text.format(models=models, conf=CONF, tmp=tmp_path) for text in overrides]


def chosen(group: str, name: str) -> str:
    """The override that chooses an option. Contenders join a run that has none by itself."""
    return f"+{group}={name}" if group == "contender" else f"{group}={name}"


def application_of(group: str) -> str:
    """The application whose configuration has a group."""
    return "train" if group in TRAINING else "run"


def section_of(group: str, name: str) -> str:
    """Where an option's settings stand in the configuration."""
    return {"contender": f"contenders.{name}", "tree": "drafter"}.get(group, group)


def test_the_files_are_found() -> None:
    groups = {path.parts[0] for path in YAML if len(path.parts) == 2}
    assert groups == {
        "target",
        "drafter",
        "tree",
        "policy",
        "verifier",
        "sampling",
        "dataset",
        "tracker",
        "engine",
        "bootstrap",
        "experiment",
        "contender",
        "pair",
        *TRAINING,
    }
    known = {"run", "demo", "compare", "replay", "replay_text", "check_verifier", "check_drafter", "optimize_tree"}
    known |= {"calibrate", "export", "inspect_drafter", "plan", "train", "bundle"}
    assert known <= set(APPLICATIONS)


def test_a_component_may_be_made_of_others(configure: Configure, saved: Path) -> None:
    words = [
        "drafter=choice",
        f"drafter.model.name={saved}/drafter",
        "drafter.model.shape=2",
        "drafter.lookup.factor=3",
    ]
    made = build(configure("run", *words), "drafter")
    assert made.lookup.factor == 3 and made.model.max_depth == 2
    for word, sentence in {
        "drafter.lookup.shared=7": "drafter.lookup.shared=7: give true or false",
        "+drafter.lookup.shard=true": "there is no drafter.lookup.shard: did you mean drafter.lookup.shared?",
        "+drafter.model.shpe=3": "there is no drafter.model.shpe: did you mean drafter.model.shape?",
    }.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            build(configure("run", *words, word), "drafter")


@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_compose(name: str, configure: Configure) -> None:
    assert configure(name)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_and_instantiates(
    group: str, name: str, configure: Configure, saved: Path, tmp_path: Path
) -> None:
    key = (group, name)
    if key == ("experiment", "fastest_shape"):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    needed = NEEDED.get(key, []) + LOCAL.get(("drafter", "model") if group == "tree" else key, [])
    config = configure(application_of(group), chosen(group, name), *filled(needed, saved, tmp_path))
    if group == "recipe":
        # Its own choices are options, which this test makes one by one; here: that nothing is missing.
        check_arguments(
            TrainSettings, {str(key): plain(config, str(key)) for key in config if key != "out"} | {"out": "."}
        )
        return
    if group == "regenerate":
        writing = plain(config, group)
        assert writing["file"] is None or typed(RegenerateConfig, settings_of_writing(writing), group)
        return
    if group in TRAINING:
        assert isinstance(build(config, group), TRAINING[group])
        return
    if group == "experiment":
        # Its own choices are options, which this test makes one by one; here: that nothing is missing.
        for section in ("target", "drafter", "verifier", "sampling", "dataset", "engine"):
            assert not OmegaConf.missing_keys(config[section])
        assert isinstance(build(config, "sampling"), SamplingParams)
        return
    if group == "engine":
        check_arguments(EngineSettings, plain(config, group), group)
        return
    made = bootstrap_of(config) if group == "bootstrap" else build(config, section_of(group, name))
    if group == "bootstrap":
        assert made == Bootstrap()
    elif group == "target":
        assert isinstance(made, Target)
    elif group == "policy":
        assert isinstance(made, LengthPolicy | NodePolicy) or (name == "none" and made is None)
    elif group in ("drafter", "tree"):
        assert isinstance(made, Drafter) or (name == "none" and made is None)
    elif group == "verifier":
        assert isinstance(made, Verifier)
    elif group == "sampling":
        assert isinstance(made, SamplingParams)
    elif group == "dataset":
        assert made.load()
    elif group == "contender":
        assert isinstance(made, OtherEngine)
    else:
        assert hasattr(made, "start")


def settings_of_writing(section: Any) -> dict[str, Any]:
    """The section ``regenerate`` without its drafter, which is a component of its own; None for what is not given."""
    given = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
    return {str(key): value for key, value in given.items() if key != "drafter"}


@pytest.mark.parametrize(
    ("group", "name"), [("target", "bundled"), *[("drafter", name) for name in ("model", "medusa", "eagle", "block")]]
)
def test_the_defaults_name_bundled_models_that_load(group: str, name: str, configure: Configure) -> None:
    config = configure("run", f"{group}={name}")
    model = config[group].name
    assert model.startswith(bundled.PREFIX)
    try:
        bundled.resolve(model)
    except ValueError as error:
        pytest.skip(str(error))
    assert build(config, group) is not None


def test_tree_shapes_from_the_command_line(configure: Configure, saved: Path) -> None:
    for text, shape in (
        ("3", TreeShape.chain(3)),
        ("[3,2]", TreeShape.branching(3, 2)),
        ("[[0],[1],[0,0]]", TreeShape.from_paths([(0,), (1,), (0, 0)])),
    ):
        config = configure("run", f"drafter.name={saved / 'drafter'}", f"drafter.shape={text}")
        drafter = build(config, "drafter")
        assert isinstance(drafter, ModelDrafter)
        assert isinstance(drafter.tree, StaticTree)
        assert drafter.tree.shape == shape
        config = configure("run", "drafter=medusa", f"drafter.name={saved / 'medusa'}", f"drafter.shape={text}")
        drafter = build(config, "drafter")
        assert isinstance(drafter, MedusaDrafter)
        assert drafter.shape == shape


def test_the_drafter_follows_the_targets_dtype(configure: Configure, saved: Path) -> None:
    drafter = build(configure("run", f"drafter.name={saved / 'drafter'}", "target.dtype=bfloat16"), "drafter")
    assert str(drafter.model.dtype) == "torch.bfloat16"


def test_experiments_may_change_every_group(configure: Configure) -> None:
    config = configure("run", "experiment=medusa_sampled")
    assert config.sampling.temperature == 1
    assert config.drafter.name == "bundled/medusa"
    # What is given on the command line wins.
    assert configure("run", "experiment=quick", "dataset.count=7").dataset.count == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.temperature=hot"], r"sampling\.temperature='hot': give a number"),
        (["sampling.top_k=1.5"], r"sampling\.top_k=1\.5: give an integer"),
        (["sampling.n=true"], r"sampling\.n=True: give an integer"),
        (["sampling.ignore_eos=1"], r"sampling\.ignore_eos=1: give true or false"),
        (["+sampling.beams=4"], r"there is no sampling\.beams: choose among temperature, "),
    ],
)
def test_wrong_arguments_are_named(overrides: list[str], message: str, configure: Configure) -> None:
    with pytest.raises(ValueError, match=message):
        build(configure("run", *overrides), "sampling")


def test_missing_values_are_named(configure: Configure) -> None:
    with pytest.raises(ValueError, match=r"dataset\.file has no value: give dataset\.file="):
        build(configure("run", "dataset=jsonl"), "dataset")


# Where files come from: passed on to transformers, and given with +, as in +drafter.revision=….
FILES = {"revision", "subfolder", "token", "cache_dir", "force_download", "local_files_only", "trust_remote_code"}
# Arguments that no YAML file can hold: objects, and what an experiment sets itself.
NOT_SETTINGS = {
    Engine: {"target", "drafter", "verifier"},
    SamplingParams: {"stream", "logits_processor", "logprobs"},
}


def arguments_of(component: Any) -> set[str]:
    """Names of all arguments that a component takes by name."""
    parameters = inspect.signature(component).parameters.values()
    named = {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return named - NOT_SETTINGS.get(component, set())


def forgotten(given: set[str], component: Any) -> set[str]:
    """The difference between a YAML file's keys and a component's arguments, in both directions."""
    wanted = arguments_of(component)
    loaded = {"name_or_path", "path"} & wanted if getattr(component, "__name__", "") == "from_pretrained" else set()
    if loaded:
        wanted = wanted - loaded - FILES | {"name"}
    return {key for key in given if key != "_target_"} ^ wanted


@pytest.mark.parametrize(("group", "name"), [each for each in OPTIONS if each[0] not in ("experiment", "recipe")])
def test_every_option_of_a_component_is_in_its_file(group: str, name: str, configure: Configure) -> None:
    section = OmegaConf.select(configure(application_of(group), chosen(group, name)), section_of(group, name))
    if group == "tree":
        section = section.shape
        if not isinstance(section, DictConfig):
            return
    if (group, name) == ("regenerate", "none"):
        return
    if group == "regenerate":
        section = settings_of_writing(section)
    component = {"engine": Engine, "bootstrap": Bootstrap, "regenerate": RegenerateConfig}.get(group)
    if component is None:
        target = section["_target_"]
        if target is None:
            return
        component = get_object(target)
    found = forgotten({str(key) for key in section}, component)
    assert not found, f"conf/{group}/{name}.yaml and {component.__qualname__} differ in {sorted(found)}"


def test_a_forgotten_option_is_found() -> None:
    """The check above on a component that has one option more than its file, and on a file with a key too many."""

    def component(size: int, *, fast: bool = True) -> None: ...

    assert forgotten({"size", "fast"}, component) == set()
    assert forgotten({"size"}, component) == {"fast"}
    assert forgotten({"size", "fast", "slow"}, component) == {"slow"}


def test_every_option_of_the_engine_is_checked() -> None:
    assert {field.name for field in fields(EngineSettings)} == arguments_of(Engine)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_every_setting_of_a_command_is_checked(name: str, configure: Configure) -> None:
    kind = getattr(settings, f"{name.title().replace('_', '')}Settings")
    assert {str(key) for key in configure(name)} == {field.name for field in fields(kind)}


@pytest.mark.parametrize(
    "path", [path for path in YAML if path.parent.name not in ("experiment", "recipe", "pair")], ids=str
)
def test_every_setting_has_a_comment(path: Path) -> None:
    """Beside the setting or above it; what refers to another setting is explained there."""
    for before, line in itertools.pairwise((CONF / path).read_text().splitlines()):
        if re.match(r"[a-z]\w*: *\S", line) and "${" not in line:
            assert "#" in line or before.startswith("#"), f"conf/{path}: {line}"


def test_null_makes_nothing(configure: Configure) -> None:
    assert build(configure("run", "drafter=none"), "drafter") is None
