"""transformers' generate beside our engine: the same outputs, and what its rounds are known to be."""

from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import candidate_generator

from experiments.contenders.base import OtherEngine
from experiments.contenders.hf import HfGenerate
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.conftest import byte_tokenizer
from tests.models import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8], [3, 4, 3, 4, 3]]


@pytest.fixture(scope="module")
def target(saved: Path) -> Target:
    return Target.from_pretrained(str(saved / "target"), dtype="float32")


def bound(target: Target, size: int = 1, made: OtherEngine | None = None) -> OtherEngine:
    made = made or HfGenerate()
    made.bind(target, max_batch_size=size, max_length=128)
    return made


def plain(target: Target, sampling: SamplingParams) -> list[tuple[int, ...]]:
    engine = Engine(target, max_length=128)
    return [engine.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]


def test_a_ragged_batch_equals_our_plain_decoding_and_the_models_own_defaults_are_not_mixed_in(target: Target) -> None:
    config = target.model.generation_config
    assert config is not None
    config.repetition_penalty, config.do_sample = 3.0, True
    try:
        for more in ({"ignore_eos": True}, {"repetition_penalty": 1.5, "stop_token_ids": (17,)}):
            sampling = SamplingParams(max_new_tokens=20, **more)  # type: ignore[arg-type]
            done = bound(target, 3).generate(PROMPTS, [sampling] * 3)
            assert [each.token_ids for each in done] == plain(target, sampling)
            for each in done:
                assert len(each.steps) == len(each.token_ids)
                assert {step.accepted for step in each.steps} == {0}
                assert each.text == byte_tokenizer().decode(each.token_ids, skip_special_tokens=True)
        assert target.model.generation_config is config, "they come back"
    finally:
        config.repetition_penalty, config.do_sample = 1.0, False


def test_drafts_leave_the_output_alone_and_rounds_are_counted(target: Target, saved: Path) -> None:
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for made in (HfGenerate(num_tokens=4), HfGenerate(assistant=str(saved / "drafter"), num_tokens=3, dtype="float32")):
        contender = bound(target, made=made)
        done = [contender.generate([prompt], [sampling])[0] for prompt in PROMPTS]
        assert [each.token_ids for each in done] == plain(target, sampling), made
        for each in done:
            assert [token for step in each.steps for token in step.token_ids] == list(each.token_ids)
        # The drafter is of the target's opinion mostly, so several tokens come from one forward.
        if "assistant_model" in made.options:
            assert sum(len(each.steps) for each in done) < 0.7 * sum(len(each.token_ids) for each in done)


@pytest.mark.parametrize(
    ("kind", "generator", "options"),
    [
        ("gemma4", "SinglePositionMultiTokenCandidateGenerator", {}),
        ("dflash", "DFlashTokenCandidateGenerator", {"speculation_type": "dflash"}),
        ("mtp", "MTPCandidateGenerator", {"use_mtp": True}),
    ],
)
def test_what_reads_the_targets_states_drafts_too(
    kind: str, generator: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    example = __import__("audit_transformers")
    torch.manual_seed(0)
    getattr(example, kind)(tmp_path)
    of, drafts = getattr(candidate_generator, generator), []
    given = of.get_candidates
    monkeypatch.setattr(of, "get_candidates", lambda *args, **named: drafts.append(given(*args, **named)) or drafts[-1])
    target = Target.from_pretrained(str(tmp_path), dtype="float32")
    assistant = None if kind == "mtp" else str(tmp_path / "assistant")
    made = HfGenerate(assistant=assistant, num_tokens=2 if kind == "gemma4" else None, dtype="float32", options=options)
    with pytest.raises(ValueError, match="transformers drafts at batch 1 only"):
        bound(target, size=2, made=made)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    done, plainly = (bound(target, made=each).generate([PROMPTS[0]], [sampling])[0] for each in (made, HfGenerate()))
    assert done.token_ids == plainly.token_ids
    assert any(ids.shape[1] > len(PROMPTS[0]) + 1 and logits is not None for ids, logits in drafts)


def test_sampling_is_seeded_by_the_request_filtered_and_leaves_the_global_generator_alone(target: Target) -> None:
    contender = bound(target)
    before = torch.get_rng_state()

    def draw(**more: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1, max_new_tokens=16, ignore_eos=True, **more)  # type: ignore[arg-type]
        return contender.generate([PROMPTS[0]], [sampling])[0].token_ids

    assert draw(seed=1, stream=1) == draw(seed=1, stream=1)
    # 257 tokens and 16 draws: equal by chance never.
    assert len({draw(seed=1, stream=1), draw(seed=2, stream=1), draw(seed=1, stream=2)}) == 3
    assert torch.equal(before, torch.get_rng_state())
    # Top-k of 1 leaves one token: a filter that does not arrive would show.
    assert draw(top_k=1) == plain(target, SamplingParams(max_new_tokens=16, ignore_eos=True))[0]


def test_stop_strings_and_processors_arrive(target: Target) -> None:
    class Only(LogitsProcessor):
        """Lets one token through."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            kept = torch.full_like(scores, -torch.inf)
            kept[:, 66] = 0.0
            return kept

    letter = byte_tokenizer().decode([66])
    only = SamplingParams(max_new_tokens=6, logits_processor=Only())
    assert bound(target).generate([PROMPTS[0]], [only])[0].token_ids == (66,) * 6
    stopped = SamplingParams(max_new_tokens=6, logits_processor=Only(), stop=(letter * 2,))
    done = bound(target).generate([PROMPTS[0]], [stopped])[0]
    assert (done.token_ids, done.text, done.finish_reason) == ((66, 66), "", "stop")


def test_what_cannot_work_is_refused_before_the_run(target: Target, saved: Path) -> None:
    other = Target(tiny_model(vocab_size=99))
    for said, make in (
        (r"at batch 1 only.*max_batch_size=2", lambda: bound(target, 2, HfGenerate(num_tokens=8))),
        ("num_tokens=0: give at least 1", lambda: HfGenerate(num_tokens=0)),
        ("nowhere", lambda: HfGenerate(assistant=str(saved / "nowhere"))),
        ("another vocabulary", lambda: bound(other, made=HfGenerate(assistant=str(saved / "drafter")))),
    ):
        with pytest.raises(ValueError, match=said):
            make()


def test_a_static_cache_is_compiled_on_a_cpu_too(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, asked = SamplingParams(max_new_tokens=6, ignore_eos=True), []
    monkeypatch.setattr(target.model, "get_compiled_call", lambda config: asked.append(config) or target.model)
    made = bound(target, made=HfGenerate(options={"cache_implementation": "static", "compile_config": {}}))
    assert made.generate(PROMPTS[:1], [sampling])[0].token_ids == plain(target, sampling)[0] and asked
