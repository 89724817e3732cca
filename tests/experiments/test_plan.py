"""``experiments.plan``: a plan from a configuration alone, and what it refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments.plan import plan
from tests.specdec.roofline.models import LLAMA_8B_CONFIG, LLAMA_70B_CONFIG

ROOT = Path(__file__).parents[2]
Configure = Callable[..., DictConfig]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a model of which nothing is there but its configuration."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG | {"torch_dtype": "bfloat16"}))
    return folder


@pytest.fixture
def planned(configure: Configure, llama: Path, tmp_path: Path) -> Any:
    """Plans for the model, with more settings, without pictures."""

    def run(*words: str) -> Any:
        out = tmp_path / "out"
        return plan(configure("plan", f"target.name={llama}", f"out={out}", "pictures=false", *words))

    return run


def test_a_plan_says_what_a_reader_wants_to_know(
    planned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned("drafter=eagle", "price=2", "batch=[1,8,512]", "context=4096")
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "8.03 billion parameters in matrices; bfloat16",
        "NVIDIA H100 SXM5 80GB: 3.35 TB/s, 989.4 TFLOP/s (printed); ridge 295 FLOP/byte",
        "EAGLE-3 head, with the sizes that such heads usually have; acceptance 0.7, an assumption",
        "a position takes 128 KiB of KV cache",
        "there is no room for a batch of 512",
        "million tokens",
        "a plain step is bound by memory however many rows there are",
    ):
        assert part in said, part
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["asked"]["device"] == "h100" and written["asked"]["prompt"] == 4096 - 256
    assert [row["fits"] for row in written["memory"]] == [True, True, False]
    decode = next(row for row in written["forwards"] if row["what"].startswith("decode"))
    assert decode["seconds"] == pytest.approx((decode["weight_bytes"] + decode["kv_read_bytes"]) / 3.35e12, rel=1e-3)
    assert {"drafted", "speedup", "break_even_batch"} <= written["map"].keys()


def test_a_plan_without_a_drafter_speaks_of_no_drafts(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = planned()
    said = capsys.readouterr().out
    assert "No drafter is given" in said and "Speculation" not in said
    assert all(phase.kind in ("prefill", "decode") for phase in made.phases)


def test_speculation_is_slower_than_its_target_never(planned: Any) -> None:
    """Where no draft pays, the best draft is none, and its speed that of plain decoding."""
    made = planned("drafter=eagle", "acceptance=0.0")
    assert all(each.best.drafted == 0 and each.best.speedup == 1 for each in made.speculations)
    for each in made.speculations:
        plain = made.cost.verify(batch=each.batch, drafted=0, context=4096)
        assert each.tokens_per_second == pytest.approx(each.batch / plain)
    sure = planned("drafter=eagle", "acceptance=1.0", "longest=4")
    assert all(each.best.drafted == 4 and each.tokens == 5 for each in sure.speculations)


def test_formats_change_bytes(planned: Any) -> None:
    half, int4 = planned(), planned("target.quantization=int4", "engine.kv_cache=int8")
    memory, smaller = half.rooms[0].memory, int4.rooms[0].memory
    assert memory.weights == 2 * half.asked.shape.weights
    tables = half.asked.shape.table_weights
    assert smaller.weights == pytest.approx(2 * tables + 0.53125 * (half.asked.shape.weights - tables))
    assert smaller.kv / memory.kv == pytest.approx((128 + 4) / 256), "a byte per number, a factor per vector"


@pytest.mark.parametrize(
    ("drafter", "said", "longest"),
    [
        ("ngram", "looks drafts up", 8),
        ("medusa", "4 Medusa heads", 4),
        ("mtp", "MTP module", 8),
        ("block", "block drafter of 5 layers", 8),
    ],
)
def test_drafters(drafter: str, said: str, longest: int, planned: Any) -> None:
    made = planned(f"drafter={drafter}")
    assert said in made.asked.drafter.title
    assert made.longest == longest
    assert made.speculations[0].best.speedup > 1


def test_a_head_that_is_here_has_its_own_sizes(configure: Configure, tmp_path: Path) -> None:
    """The bundled head for the bundled target: its 4,096 tokens are those of its file."""
    made = plan(configure("plan", "drafter=eagle", "pictures=false", f"out={tmp_path}"))
    assert made.asked.drafter is not None and "sizes from bundled/eagle3" in made.asked.drafter.title
    assert made.asked.drafter.model is not None and made.asked.drafter.model.shape.vocab == 4096


def test_a_configuration_that_leaves_something_out_is_completed(configure: Configure, tmp_path: Path) -> None:
    """transformers' class knows what Gemma-2's files do not say."""
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps({"model_type": "gemma2", "num_hidden_layers": 2, "hidden_size": 64}))
    made = plan(configure("plan", f"target.name={path}", "pictures=false", f"out={tmp_path / 'out'}"))
    assert made.asked.shape.tied and made.asked.shape.vocab == 256_000


def test_pictures_are_drawn(configure: Configure, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan(configure("plan", f"target.name={llama}", "drafter=eagle", f"out={out}"))
    for name in ("roofline", "where_it_pays"):
        assert (out / f"{name}.png").stat().st_size > 20_000 and (out / f"{name}.svg").is_file()
    text = (out / "where_it_pays.svg").read_text()
    assert "acceptance 0.7" in text and "1,024" in text


def own_device(folder: Path) -> str:
    """A file with a device of which something was measured."""
    path = folder / "devices.yaml"
    path.write_text(
        "mine:\n  memory: 80e9\n  bandwidth: 2e12\n  flops: {bfloat16: 5e14}\n  source: here\n"
        "  measured: {bandwidth: 1e12}\n"
    )
    return str(path)


def test_a_device_of_ones_own_and_what_was_measured(planned: Any, tmp_path: Path) -> None:
    words = (f"devices={own_device(tmp_path)}", "device=mine", "batch=1")
    printed, measured = planned(*words), planned(*words, "measured=true")
    plain = printed.phases[1].seconds
    assert measured.phases[1].seconds == pytest.approx(2 * plain, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=h10"], "there is no device 'h10' in the table: did you mean h100?"),
        (["context=200000"], "context=200000: the model has 131072 positions, give at most so many"),
        (["context=100", "output=100"], "output=100 leaves no prompt in a context of 100"),
        (["measured=true"], "measured=true: the row of h100 has no measured figures"),
        (["target.quantization=int3"], "target.quantization='int3': give one of int8,"),
        (["target.dtype=float8"], "target.dtype='float8': give float32, bfloat16"),
        (["drafter=model"], "has a vocabulary of 4,096 tokens"),
        (["drafter=merged"], "a plan knows model, eagle, mtp, block, medusa"),
        (["target.name=/nowhere"], "there is no file or folder '/nowhere'"),
        (["target.name=/nowhere.json"], "there is no file or folder '/nowhere.json'"),
        (["devices=/nowhere.yaml"], "devices='/nowhere.yaml' cannot be read"),
    ],
)
def test_what_is_refused(words: list[str], said: str, planned: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        planned(*words)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 2}', "BertModel is an encoder"),
        ('{"model_type": "t5", "is_encoder_decoder": true}', "encoder-decoder"),
        ("{}", "has no layers"),
        ("[1]", "holds no configuration"),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "unheard_of", "num_hidden_layers": 2}', "has no hidden_size"),
    ],
)
def test_configurations_that_are_refused(config: str, said: str, configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(ValueError, match=said):
        plan(configure("plan", f"target.name={path}", "pictures=false", f"out={tmp_path}"))


def test_a_head_of_another_target_is_refused(planned: Any, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(LLAMA_70B_CONFIG | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="a head for hidden states of 8192 numbers"):
        planned("drafter=eagle", f"drafter.name={head}")


def test_a_plan_needs_no_torch(llama: Path, tmp_path: Path) -> None:
    """Neither the command, nor what draws its pictures, in a process of its own."""
    code = (
        "import sys; sys.argv = ['plan', *sys.argv[1:]]\n"
        "from experiments.plan import main\n"
        "main()\n"
        "import experiments.reporting.plan_plot\n"
        "print([name for name in ('torch', 'transformers', 'scipy', 'pandas') if name in sys.modules])"
    )
    words = [f"target.name={llama}", "drafter=eagle", "pictures=false", f"out={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
