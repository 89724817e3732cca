"""The table of mistakes: input → an error of one sentence that names the argument, before any work."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.config.launch import sentence
from tests.experiments.conftest import called
from tests.experiments.runs import command_of, invoke
from tests.public_models import CONFIGS

MINE = """
from drafters import NGramDrafter
from experiments.datasets.prompt import Prompt
from specdec.interfaces import Drafter

NUMBER = 3


class Lookup(NGramDrafter):
    def propose(self, slots):
        return {}["missing"]


class Unbound(NGramDrafter):
    def bind(self, target, sizes):
        self.width = target.width


class Unfinished(Drafter):
    pass


class Data:
    count, seed = None, 0

    def load(self):
        import json

        return [Prompt(**json.loads("{oops"))]
"""
FILES = {
    "own_parts.py": MINE,
    "own_syntax.py": "def f(:\n    pass\n",
    "a_file": "notes\n",
    "bad.jsonl": '{"turns": ["a"]}\n{"turns": 3}\n',
    "conf/dataset/data.yaml": "_target_: own_parts.Data\n",
    "llama/config.json": json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}),
    "head70/config.json": json.dumps(CONFIGS["llama-3.1-70b"] | {"num_hidden_layers": 1}),
    **{f"text/{name}.txt": f"spam and {name}, " * 20 for name in "abcd"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(text)
    yield found
    for name in ("own_parts", "own_syntax"):
        sys.modules.pop(name, None)


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with components that fail, from where the commands are started."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


DEFAULTS = {
    "run": "target.name={models}/target method=m drafter=ngram",
    "train": "target.name={models}/target target.device=cpu data=text data.files=text/*.txt data.held_out=0.25 "
    "fit='{{steps: 4, batch_size: 2, length: 32, lr: 1e-2, warmup: 1}}'",
    "plan costs=fit": "target.name={models}/target drafter=model drafter.shape=2 seconds=0 rounds=1 "
    "drafter.name={models}/drafter",
    "load": "target.name={models}/target method=m drafter=ngram requests=4 threads=1 dataset.count=4 "
    "dataset.prompt_tokens=16",
    "check drafter=model": "target.name=/nowhere",
    "check inspect=true": "target.name={models}/target",
    "plan": "target.name=llama",
    "plan costs=timed": "target.name={models}/target threads=1 seconds=0 batch=1 nodes=[2]",
    "bench": "inflate=null rounds=4 temperatures=[0] threads=1 device=cpu",
}
OWN = "drafter=none drafter._target_="
TWO = "drafter=none method=none +drafter@methods.copied=ngram +drafter@methods.drawn=model +verifier@rules.drawn=block"
TWO += " +drafter@methods.nothing=none"
MISTAKES: dict[str, dict[str, str]] = {
    "run": {
        "drafter=model temperature=1": "temperature: did you mean drafter.temperature or sampling.temperature?",
        "engine.max_length=20": "no prompt fits: ",
        "bootstrap.confidence=95": "bootstrap.confidence=95: give a level between 0 and 1",
        "engine.kv_cache=int8 +contender=hf_generate": "engine.kv_cache=int8",
        "engine.scheduler._target_=x.Y": "engine.scheduler is empty: give '+engine.scheduler={_target_:…}'",
        "dataset=jsonl dataset.file=bad.jsonl": 'bad.jsonl, line 2: "turns" must be a list',
        "dataset=text dataset.files=*.nothing": "dataset.files: no file matches",
        "target.name=llama": "llama has no tokenizer, and prompts are text: give target.tokenizer=FOLDER",  # early
        "drafter=model drafter.name={models}/uno": "it is an adapter, give the name of its model",
        "target.name=bundled/target drafter=model drafter.adapter={models}/uno": "is of another base (target): its ",
        "drafter=pard drafter.name={models}/pard drafter.mask_token_id=a": "drafter.mask_token_id='a': give an integer",
        "drafter=choice +drafter.model.shpe=3": "drafter.model.shpe: did you mean drafter.model.shape?",
        f"{OWN}own_parts.NUMBER": "drafter._target_='own_parts.NUMBER' is of type int",
        f"{OWN}nowhere.X": "drafter._target_='nowhere.X'",
        f"{OWN}own_syntax.X": "SyntaxError: invalid syntax (at own_syntax.py:1;",
        f"{TWO} drafter=suffix": "drafter and methods",
        "'+unknown={{a: 1}}'": "there is no unknown",
        f"{TWO} +setups.copid.engine.optimize=false": "setups.copid: there is no method 'copid': did you mean copied?",
        f"{TWO} +setups.copied.engine.max_length=64": "setups.copied.engine.max_length",
        f"{TWO} +setups.copied.engine.optimize=false +contender=hf_generate": "contenders and setups",
        "drafter=model +policy@policies.a=fixed +policy@policies.b=fixed objective=speedup": "objective=speedup",
    },
    "replay": {"nowhere verifiers=[3]": "there is no verifier 3", "": "trace has no value"},
    "check": {"": "drafter._target_=None and verifier._target_=None: give drafter=NAME"},
    "check drafter=model": {
        f"{OWN}own_parts.Unfinished": "drafter: Unfinished has no bind: write it",
        "target.name={models}/target drafter=ngram policy=confidence": "policy=cost_aware or policy=additive",
    },
    "check inspect=true": {"drafter=none": "drafter=none", "drafter=ngram": "NGramDrafter is not one trained model"},
    "plan costs=fit": {"grid.context=[100000]": "grid.context="},
    "plan costs=timed": {"context=100000": "give at most so many together", "draft_costs=[-1]": "draft_costs=[-1"},
    "plan": {
        "acceptance=1.5": "acceptance=1.5: give a probability from 0 to 1, or a list",
        "batch=[1,0]": "batch=[1, 0]: give an integer of at least 1, or a list",
        "+grid.bach=[1]": "there is no grid.bach: did you mean grid.batch?",
        "~grid.batch": "grid.batch is missing",
        "context=200000": "context=200000: the model has 131072 positions",
        "context=100 output=100": "output=100",
        "target.name=bundled/target target.inflate=110n": "inflate='110n'",
        "drafter=eagle drafter.name=head70": "a head for hidden states of 8192 numbers",
    },
    "bench": {"drafts=[ngarm]": "did you mean ngram", "against=no-such-commit": "commit: give a commit"},
    "compare": {"runs=a format=pdf": "format='pdf'", "runs=nothing/*": "no folder matches"},
    "load": {
        "arrival=closed rates=[1.5]": "arrival.rate=1.5: give a number of users",
        "rates=[2,1,2]": "rates=[2, 1, 2]: give each rate once",
        "requests=null": "requests=null: give a number of requests, or arrival=trace",
        "arrival=trace 'arrival.window=[1e5,2e5]'": "nothing arrives then in azure_conversation",
        "workload=trace": "workload=trace takes its lengths from the arrivals",
        "policy=fixed drafter=none": "a policy is given, and plain decoding alone drafts nothing",
        "policy=cost_aware_nodes": "chooses nodes by the probabilities of a drafting model, and NGramDrafter has none",
    },
    "train target.name=null": {
        "export={models}/uno overwrite=true": "holds an adapter: to export it merged",
        "export={models}/redrafter overwrite=true": "holds no drafter that is known here, its tensors are ",
        "'export={{name: {models}/medusa, adapter: {models}/uno}}' overwrite=true": "export.adapter: ",
    },
    "train": {
        "fit.length=512": "fit.length=512",
        "sharded=true": "sharded=true divides the head among processes, and there is one",
        "loss=dspark loss.weights=[1]": "2 terms and 1 weights",
        "head=medusa loss=edr": "ExpectedRounds weighs the depths of a draft itself: give weights=equal",
        "head=lm loss=block_verification weights=equal": "trains depth 1 alone: give another loss",
        "head=eagle3 head.hidden_layers=[1,2,99]": "layer 99",
        "head=dflash head.mask_token_id=999": "head.mask_token_id=999",
        "head=peagle head.keeps=0": "head.keeps=0",
        "head=dflash 'head.config={{markov_rnk: 3}}'": "head.config.markov_rnk is no further field",
        "head=dflash 'head.config={{sliding_window: 0}}'": "head.config.sliding_window=0: give",
        "target.name=llama head=lora head.name={models}/other": "or drafter=tli or slem",
        "head=medusa head.name={models}/medusa head.depths=2": "holds 3 heads of width 32",
        "loss=kl loss._target_=experiments.training.weights.Power": "losses.DraftLoss: give one",
    },
}


def mistake(command: str, words: list[str]) -> str:
    name, *first = command.split()
    try:
        called(command_of(name), *first, *words)
    except Exception as error:
        return sentence(error)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize(("command", "words"), [(name, words) for name, rows in MISTAKES.items() for words in rows])
def test_a_mistake_gets_one_sentence_before_any_work(command: str, words: str, saved: Path, mine: Path) -> None:
    has_out = not command.startswith("check")
    given = f"{'out=out ' * has_out}{DEFAULTS.get(command, '')} {words}".format(models=saved)
    found = mistake(command, shlex.split(given))
    assert MISTAKES[command][words] in found and "\n" not in found
    assert ("HYDRA_FULL_ERROR" in found) == ("own_syntax" in words), "anything else is input"
    assert not (mine / "out" / "records.jsonl").exists() and not (mine / "out" / "best").exists()


SMALL = ["dataset.count=1", "dataset.prompt_tokens=16", "sampling.max_new_tokens=4", "warmup_prompts=0", "out=short"]
OF_FUNCTION = r".* \(at own_parts.py:{line} in "


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("words", "said", "line"),
    [
        (["hydra.run.dir=a_file"], "cannot use 'a_file': File exists", ""),
        (["pair=glm45_air_mtp"], "pair=glm45_air_mtp brings its own drafter, and drafter=ngram is chosen", ""),
        (["--config-dir", "conf", "dataset=data"], f"Expecting property name{OF_FUNCTION}Data.load", "{oops"),
        ([f"{OWN}own_parts.Unbound"], f"object has no attribute 'width'{OF_FUNCTION}Unbound.bind", "target.width"),
        ([f"{OWN}own_parts.Lookup", *SMALL], f"KeyError: 'missing'{OF_FUNCTION}Lookup.propose", "missing"),
    ],
)
def test_the_command_line_ends_with_the_sentence(words, said, line, saved: Path, mine, monkeypatch, capsys) -> None:
    """A component's own line is named: not the framework's that called it, nor Python's or torch's that it called."""
    given = [f"target.name={saved / 'target'}"] * ("pair" not in words[0]) + ["drafter=ngram", "out=out"]
    given += [part for word in words for part in word.split()]
    assert invoke(*given, monkeypatch=monkeypatch, tmp_path=mine) == 1
    *begun, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and all(re.match(r"[\d:]+ (s|min): ", told) for told in begun)
    assert re.search(said.format(line=MINE.partition(line or MINE)[0].count("\n") + 1), error)
    if "Unbound" in said:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(AttributeError, match="has no attribute 'width'"):
            invoke(*given, monkeypatch=monkeypatch, tmp_path=mine)
