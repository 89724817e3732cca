"""The options of a group: the package's, those of the user's folders, and classes that have no file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from experiments.config.groups import option_names, sections
from experiments.config.sections import CONF


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's configuration with a rule that is new and one that takes the place of the package's."""
    conf = tmp_path / "my conf"  # with a space, as folders have
    (conf / "verifier").mkdir(parents=True)
    (conf / "verifier" / "mine.yaml").write_text("_target_: verifiers.LenientVerifier\nlenience: 0.25\n")
    (conf / "verifier" / "empty.yaml").write_text("lenience: 0.25\n")
    return conf


@pytest.fixture
def searching(folder: Path) -> Iterator[str]:
    """A job that was started with a folder in ``hydra.searchpath``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("run", [f"hydra.searchpath=['file://{folder}']"], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        yield "verifier"
    HydraConfig.instance().cfg = None


def test_the_search_path_of_the_job_counts_one_may_be_given_and_a_class_needs_no_file(
    searching: str, folder: Path
) -> None:
    assert {"mine", "block"} <= set(option_names(searching))
    own = {"_target_": "verifiers.LenientVerifier", "lenience": 0.75}
    found = sections(searching, ["block", "mine", {"name": "mine", "lenience": 0.5}, own])
    assert list(found) == ["block", "mine", "mine, lenience=0.5", "LenientVerifier, lenience=0.75"]
    assert [section.get("lenience") for section in found.values()] == [None, 0.25, 0.5, 0.75]
    HydraConfig.instance().cfg = None
    assert sections("verifier", ["mine"], [f"file://{folder}"])["mine"].lenience == 0.25
    assert "mine" not in option_names("verifier"), "and is forgotten"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "block", "size": 1}, "verifier block has no 'size'"),
        ({"name": "block", "_target_": "verifiers.BlockVerifier"}, "is no verifier"),
        ({}, "{} is no verifier"),
        ({"_target_": "nowhere.Rule"}, "'nowhere'"),
    ],
)
def test_a_wrong_entry_is_refused(entry: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sections("verifier", [entry])
