"""Every YAML composes, and what it names can be made."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from experiments.app.config import CONF, build
from specdec import bundled
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.tree import TreeShape

YAML = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
OPTIONS = [(path.parent.as_posix(), path.stem) for path in YAML if len(path.parts) == 2]
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
}
# Where tiny models stand in for what these name.
LOCAL = {
    ("target", "bundled"): ["target.name={models}/target"],
    ("drafter", "model"): ["drafter.name={models}/drafter"],
    ("drafter", "medusa"): ["drafter.name={models}/medusa"],
}

Configure = Callable[..., DictConfig]


def filled(overrides: list[str], models: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    return [text.format(models=models, conf=CONF, tmp=tmp_path) for text in overrides]


def test_the_files_are_found() -> None:
    groups = {group for group, _ in OPTIONS}
    assert groups == {
        "target",
        "drafter",
        "verifier",
        "sampling",
        "dataset",
        "tracker",
        "engine",
        "bootstrap",
        "experiment",
    }
    assert {"run", "demo", "compare", "replay", "check_verifier", "train"} <= set(APPLICATIONS)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_compose(name: str, configure: Configure) -> None:
    assert configure(name)


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_and_instantiates(
    group: str, name: str, configure: Configure, saved: Path, tmp_path: Path
) -> None:
    key = (group, name)
    needed = NEEDED.get(key, []) + LOCAL.get(key, [])
    config = configure("run", f"{group}={name}", *filled(needed, saved, tmp_path))
    if group == "experiment":
        # Its own choices are options, which this test makes one by one; here: that nothing is missing.
        for section in ("target", "drafter", "verifier", "sampling", "dataset", "engine"):
            assert not OmegaConf.missing_keys(config[section])
        assert isinstance(build(config, "sampling"), SamplingParams)
        return
    made = build(config, group)
    if group == "target":
        assert isinstance(made, Target)
    elif group == "drafter":
        assert isinstance(made, Drafter) or (name == "none" and made is None)
    elif group == "verifier":
        assert isinstance(made, Verifier)
    elif group == "sampling":
        assert isinstance(made, SamplingParams)
    elif group == "dataset":
        assert made.load()
    else:
        assert hasattr(made, "start")


@pytest.mark.parametrize(("group", "name"), [("target", "bundled"), ("drafter", "model"), ("drafter", "medusa")])
def test_the_defaults_name_bundled_models_that_load(group: str, name: str, configure: Configure) -> None:
    config = configure("run", f"{group}={name}")
    model = config[group].name
    assert model.removeprefix(bundled.PREFIX) in bundled.NAMES
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
        assert drafter.shape == shape
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


def test_null_makes_nothing(configure: Configure) -> None:
    assert build(configure("run", "drafter=none"), "drafter") is None
