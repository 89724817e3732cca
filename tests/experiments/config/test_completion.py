"""Shell completion, as bash really calls it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "examples" / "project"
# What bash does on Tab: it sets these variables and calls the function that `complete` has registered.
TAB = """
eval "$({command} -sc install=bash)"
[[ $(complete -p {command}) == *" -F hydra_bash_completion {command}" ]] || exit 3
tab() {{
    COMP_LINE=$1 COMP_POINT=${{#1}}
    local typed=($1)
    COMP_CWORD=${{#typed[@]}}
    [[ $1 == *" " ]] || COMP_CWORD=$((COMP_CWORD - 1))
    COMPREPLY=()
    hydra_bash_completion
    echo "${{COMPREPLY[@]}}"
}}
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with console scripts as pip writes them, but none of the working directory on their path."""
    for command in ("run", "replay"):
        path = tmp_path / f"specdec-{command}"
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path[0] = {str(ROOT)!r}\n"
            f"from experiments.{command} import main\nsys.exit(main())\n"
        )
        path.chmod(0o755)
    return tmp_path


def offered(scripts: Path, command: str, *lines: str) -> list[set[str]]:
    """What bash offers for lines that are not finished."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    script = TAB.format(command=command) + "".join(f"tab {shlex.quote(line)}\n" for line in lines)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_names_and_settings_are_completed(scripts: Path) -> None:
    """Those of the package and of an own folder; a folder before the overrides is no obstacle."""
    groups, options, settings, swept, nonsense, own, _, folder = offered(
        scripts,
        "specdec-run",
        "specdec-run dra",
        "specdec-run drafter=m",
        "specdec-run drafter=ngram drafter.b",
        "specdec-run drafter=ngram,model -m samp",
        "specdec-run drafter=ngram '",
        "specdec-run --config-dir conf verifier=c",
        "specdec-run verifier=c",
        "specdec-run drafter=ngram --config-dir co",
    )
    assert groups == {"drafter=", "drafter."}
    assert options == {f"drafter={name}" for name in ("marginals", "medusa", "merged", "model", "mtp")}
    assert settings == {"drafter.branches="}
    assert "sampling=" in swept
    assert not nonsense, "and nothing is printed in the middle of the user's line"
    assert own == {"verifier=cascade", "verifier=cautious"}
    assert folder == {"conf"}, "the shell's own completion of files"
    (found,) = offered(scripts, "specdec-replay", "specdec-replay outputs/first basel")
    assert found == {"baseline="}
