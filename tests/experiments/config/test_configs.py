"""Every YAML composes, what it names can be made, and what documents say of it is there. No test goes to the hub."""

import re
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.config.kinds import check_arguments, parameters_of
from experiments.config.sections import CONF, TABLES, bootstrap_of, build, choices_of, component_of, plain, values_of
from experiments.results.statistics import Bootstrap
from experiments.session import methods
from experiments.training.data.regenerate import RegenerateConfig
from specdec import Engine, SamplingParams, Target
from specdec.engine import scheduler
from tests.experiments.runs import Configure, command_of

YAML = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
FILES_OF_OPTIONS = [path for path in YAML if len(path.parts) == 2 and path.parts[0] != "options"]
OPTIONS = [(path.parent.as_posix(), path.stem) for path in FILES_OF_OPTIONS]
OPTIONS += [(group, name) for group, options in TABLES.items() if group != "pair" for name in options]
"""Pairs need files that are on the hub: only their arguments are checked."""
BENCHMARKS = ("jsonl", "spec_bench", "mt_bench", "humaneval", "mbpp", "gsm8k", "math500", "speed_bench")
HEADS = ("medusa", "hydra", "assistant", "redrafter", "eagle", "peagle", "pard", "uno", "block")
# What a file leaves to the user or has on the hub, where no test goes, and where tiny models stand in.
GIVEN = {
    **{("dataset", name): ("dataset.file={tmp}/prompts.jsonl",) for name in BENCHMARKS},
    **{("target", name): ("target.name={models}/target",) for name in ("hf", "bundled")},
    ("dataset", "text"): ("dataset.files={conf}/run.yaml",),
    ("data", "text"): ("data.files={conf}/run.yaml",),
    ("data", "chat"): ("data.file={tmp}/prompts.jsonl",),
    ("regenerate", "target"): ("regenerate.file={tmp}/answers.jsonl",),
    ("drafter", "model"): ("drafter.name={models}/drafter",),
    **{("drafter", name): (f"drafter.name={{models}}/{name}",) for name in HEADS},
    **{("drafter", name): ("drafter.name={models}/other",) for name in ("tli", "slem")},
    **{("drafter", name): ("drafter.model.name={models}/drafter",) for name in ("choice", "merged")},
    ("drafter", "rest"): ("drafter.corpus={models}/text.corpus",),
    ("drafter", "staged"): ("drafter.helper.name={models}/drafter",),
    ("clock", "virtual"): ("clock.costs=llama_8b_h100", "clock.traces=traces.safetensors"),
    ("contender", "hf_assisted"): ("contenders.hf_assisted.assistant={models}/drafter",),
}
TRAINING = ("head", "loss", "weights", "data", "regenerate")
METHODS = {"target": "from_pretrained", "drafter": "describe", "tree": "describe", "verifier": "laws", "policy": "bind"}
METHODS |= {"scheduler": "plan", "contender": "ends", "tracker": "start", "dataset": "load", "sampling": "seeded"}
METHODS |= {"head": "anchors", "loss": "over", "weights": "__call__", "data": "check", "bootstrap": "interval"}
"""A method of what the options of a group make, but for ``none``."""
WHOLE = ("experiment", "recipe")
"""Groups whose options set several sections, which this test makes one by one; here: that nothing is missing."""


def composed(group: str, name: str, configure: Configure) -> tuple[DictConfig, str]:
    """A configuration with an option of a group, and the section where the option's settings stand.

    Only the option is composed, and put into a configuration that was composed before, but for options that change
    other sections: trees, heads and servers.
    """
    application = "train" if group in TRAINING else "run"
    section = {"contender": f"contenders.{name}", "tree": "drafter", "scheduler": "engine.scheduler"}.get(group, group)
    if group in ("tree", "head") or (group, name) == ("engine", "openai"):
        return configure(application, f"{group}={name}"), section
    config = configure(application)
    part = OmegaConf.create(TABLES[group][name]) if group in TABLES else OmegaConf.load(CONF / group / f"{name}.yaml")
    if "defaults" in part:
        ConfigStore.instance().store("only", {})
        with initialize_config_dir(str(CONF), version_base="1.3"):
            part = OmegaConf.select(compose("only", [f"+{group}={name}"]), section)
    with open_dict(config):
        OmegaConf.update(config, section, part, merge=False, force_add=True)
    return config, section


@pytest.mark.parametrize(("group", "name"), [each for each in OPTIONS if each[0] in WHOLE])
def test_every_study_and_recipe_composes(group: str, name: str, configure: Configure) -> None:
    if name == "fastest_shape":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    command = "train" if group == "recipe" else "load" if name.startswith("load_") else "run"
    config = configure(command, f"{group}={name}", *["method=m"] * (command != "train"))
    settings = {str(key): plain(config, str(key)) for key in config if key != "out"} | {"out": "."}
    check_arguments(kind := command_of(command).settings, values_of(kind, settings))
    if command == "run" and config.methods:
        named = {*config.methods, *config.contenders, "plain"}
        assert {*config.labels, *config.rules, *config.setups} <= named
        shown = {*config.methods, *config.contenders} - {"plain"}
        assert not config.labels or set(config.labels) - {"plain"} == shown, "every method that is shown has a label"
    if name == "medusa_sampled":  # what a study changes; the command line wins
        assert config.sampling.temperature == 1 and config.drafter.name == "bundled/medusa"
        assert configure("run", f"experiment=[{name},quick]", "dataset.count=7").dataset.count == 7


@pytest.mark.parametrize(("group", "name"), [each for each in OPTIONS if each[0] not in WHOLE])
def test_every_option_composes_and_instantiates(group: str, name: str, configure, saved: Path, tmp_path: Path) -> None:
    """And its file has every option of the component that it names, and no other."""
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    config, section = composed(group, name, configure)
    settings = OmegaConf.select(config, section)
    settings = settings.shape if group == "tree" else settings
    if isinstance(settings, DictConfig) and group != "regenerate" and settings.get("_target_", group):
        ours = {"engine": Engine, "bootstrap": Bootstrap}
        component = get_object(settings["_target_"]) if "_target_" in settings else ours[group]
        found = forgotten({str(key) for key in settings}, component)
        assert not found, f"conf/{group}/{name}.yaml and {component.__qualname__} differ in {sorted(found)}"
    for word in GIVEN.get(("drafter", "model") if group == "tree" else (group, name), ()):
        key, _, value = word.format(models=saved, conf=CONF, tmp=tmp_path).partition("=")
        OmegaConf.update(config, key, value)
    if group == "regenerate":
        writing = {key: value for key, value in plain(config, group).items() if key != "drafter"}
        if writing["file"] is not None:
            check_arguments(RegenerateConfig, writing, group)
    elif group == "engine" and name != "openai":
        check_arguments(Engine, plain(config, group), group, given_first=True)
    else:
        made = bootstrap_of(config) if group == "bootstrap" else build(config, section)
        assert METHODS.get(group, "__class__") in dir(made) or (name == "none" and made is None)
        assert group != "dataset" or made.load()


# Where files come from: passed on to transformers, and given with +, as in +drafter.revision=….
FILES = {"revision", "subfolder", "token", "cache_dir", "force_download", "local_files_only", "trust_remote_code"}
FILES |= {"gguf_file"}
# Arguments that no YAML file can hold: objects, and what an experiment sets itself.
NOT_SETTINGS: dict[Any, set[str]] = {Engine: {"target", "drafter", "verifier"}}
NOT_SETTINGS[SamplingParams] = {"stream", "logits_processor", "logprobs", "priority", "deadline"}


def forgotten(given: set[str], component: Any) -> set[str]:
    """The difference between a YAML file's keys and the arguments that a component takes by name, both ways."""
    unnamed = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    wanted = {name for name, each in parameters_of(component).items() if each.kind not in unnamed}
    wanted -= NOT_SETTINGS.get(component, set())
    loaded = {"name_or_path", "path"} & wanted if getattr(component, "__name__", "") == "from_pretrained" else set()
    if loaded:
        given, wanted = given - FILES, wanted - loaded - FILES | {"name"}
    return {key for key in given if key != "_target_"} ^ wanted


def test_a_forgotten_option_is_found() -> None:
    """The check above on a component that has one option more than its file, and on a file with a key too many."""

    def component(size: int, *, fast: bool = True) -> None: ...

    assert forgotten({"size"}, component) == {"fast"}
    assert forgotten({"size", "fast", "slow"}, component) == {"slow"}


PAGE = CONF.parent / "docs" / "training.md"


@pytest.mark.parametrize("name", sorted(TABLES["pair"]))
def test_a_pair_resolves_to_constructor_arguments(name: str, configure: Configure) -> None:
    pair = TABLES["pair"][name]
    chosen, head = choices_of(pair), (pair.get("drafter") or {}).get("name")
    setting, value = ("max_ngram", 3) if chosen["drafter"] == "ngram" else ("temperature", 0.5)
    config = configure("check" if name.endswith("_mtp") else "run", f"pair={name}", f"drafter.{setting}={value}")
    assert component_of(config, "drafter")[1][setting] == value and component_of(config, "target")[0].__self__ is Target
    assert chosen.keys() == {"target", "drafter"}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", each) for each in (config.target.name, head) if each)
    files = head or ("without files" if chosen["drafter"] == "ngram" else "in the target's files")
    shown = f"`{chosen['drafter']}`{':' if head else ','} {files}"
    assert f"| `{name}` | {config.target.name} | {shown} | " in PAGE.read_text(), "the page lists it"


def test_models_that_do_not_fit_are_refused_by_their_files(configure: Configure, monkeypatch) -> None:
    """Caches of 64 slots of 1,024 positions are the most; fewer bits of 10 MiB of weights help where those are."""
    config = configure("run", "drafter=model", "engine.max_batch_size=64")
    for free, words in (
        (1e12, ""),
        (1e8, r"target and drafter .*: 238 MiB are needed \(target 10 MiB, .* caches 224 MiB\), and 95 MiB are free"),
        (1e8, r"; give engine\.max_length=\d\d\d$"),
        (245e6, r"give target\.quantization=int4 \(232 MiB\) or engine\.max_length=10\d\d$"),
        (5e6, r"; give a smaller model"),
    ):
        monkeypatch.setattr(methods, "free_memory", lambda device, free=free: free)
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            methods.check_memory(config, ["drafter"])


def test_every_scheduler_has_a_file() -> None:
    names = {str(OmegaConf.load(path)._target_).rpartition(".")[2] for path in (CONF / "scheduler").glob("*.yaml")}
    assert names == {*scheduler.__all__} - {"Scheduler", "View", "Work"}


DOCUMENTS = [CONF.parent / "README.md", CONF.parent / "CONTRIBUTING.md", *sorted((CONF.parent / "docs").rglob("*.md"))]
OWN = "## Your own project"
"""The section about options of a project of one's own, the last one of its page, which has a test of its own."""
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()} | {*TABLES}
SETTINGS = {field.name for command in ("run", "train") for field in fields(command_of(command).settings)}
PLACEHOLDERS = re.compile(r"…|\bNAME\b|\bFOLDER\b|\bRUN\b|=x$|=$|[a-z]\||<Tab>|package\.module")
"""Values that a reader has to fill in."""


def overrides_in(text: str) -> list[str]:
    """The overrides in the code spans of a text: none of Python's keywords, no placeholders."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    override = re.compile(r"""(?<![\w(])[+~]?[\w.@/-]+=(?:\{[^}]*\}|\[[^\]]*\]|"[^"]*"|[^\s']*)""")
    words = [word for span in re.findall(r"`([^`]+)`", text) for word in override.findall(span)]
    of_ours = re.compile(rf"[+~]?({'|'.join(GROUPS | SETTINGS)})[.@=]")
    return [word for word in words if of_ours.match(word) and not PLACEHOLDERS.search(word)]


@cache
def files() -> list[tuple[str, Any]]:
    """The content of every file of conf/, behind the name of its folder."""
    return [(path.parent.name, OmegaConf.to_container(OmegaConf.load(CONF / path))) for path in YAML]


def sections(name: str) -> list[Any]:
    """The settings that a section may hold: its files', and those that commands and studies give."""
    told = [(folder, content) for folder, content in files() if folder in (name, "", "experiment")]
    found = [content if folder == name else content.get(name) for folder, content in told]
    return [*found, *TABLES.get(name, {}).values()]


def exists(override: str) -> bool:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    first, *keys = parsed.key_or_group.split(".")
    if not keys:
        value = parsed.value()
        chosen = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
        options = {path.stem for path in (CONF / first).rglob("*.yaml")} | {*TABLES.get(first, ())}
        return set(chosen) <= options if first in GROUPS and chosen else first in GROUPS | SETTINGS
    if parsed.is_add() or first in ("methods", "rules", "policies", "setups", "contenders"):
        return True  # a name of the reader's
    found = sections(first)
    for key in keys:
        found = [each[key] for each in found if isinstance(each, dict) and key in each]
    return bool(found)


SHOWN = sorted({word for document in DOCUMENTS for word in overrides_in(document.read_text().partition(OWN)[0])})


def test_shown_overrides_exist() -> None:
    assert {"chat_template={enable_thinking: false}", "dataset.tasks={}", "target.inflate=110m"} <= set(SHOWN)
    assert [override for override in SHOWN if not exists(override)] == []
    assert not any(map(exists, ["dataset.taks={}", "drafter=ngrm", "sed=1"]))
