"""A drafter tried against its contract, a rule tried on tables, or a trained head inspected, and what is printed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.config.sections import build, plain, sections
from experiments.reporting import checks, terminal
from experiments.reporting.progress import steps_shown
from experiments.session.engines import settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from specdec.interfaces import Drafter, Verifier
from specdec.target.target import Target
from specdec.types import DraftSampling, Exactness, Noise

_DEEPEST = 7
"""The longest chain that is inspected, unless another length is wanted."""


def check(config: DictConfig) -> Any:
    """Do the check that a configuration asks for; one that fails is an error."""
    settle(config)
    if config.inspect:
        return _inspect(config)
    return _check_drafter(config) if config.drafter.get("_target_") is not None else _check_verifier(config)


def _check_drafter(config: DictConfig) -> list[Any]:
    """Try a drafter; print a line per check and the verdict."""
    from specdec.checks.drafter import check_drafter
    from specdec.checks.playing import Status
    from verifiers import RejectionVerifier, SharedNoiseVerifier

    check_components(config, {"": "drafter"}, ("target", "sampling"))
    engine, sampling, target = plain(config, "engine"), build(config, "sampling"), build(config, "target")

    def make() -> Drafter:
        drafter = paced(build(config, "drafter"), build(config, "policy"))
        assert drafter is not None, "refused above"
        return drafter

    with steps_shown("drafter") as say:
        findings = check_drafter(
            make,
            target,
            verifier=SharedNoiseVerifier() if DraftSampling.COUPLED in make().laws else RejectionVerifier(),
            sampling=sampling,
            tokens=config.tokens or 24,
            max_length=engine["max_length"],
            options={name: engine.get(name) for name in ("attention", "optimize", "kv_cache")},
            progress=say,
            **{name: config[name] for name in ("prompts", "rounds", "draws")},
        )
    drafter = config.drafter._target_.removesuffix(".from_pretrained").rpartition(".")[2]
    terminal.show(terminal.console(), checks.drafter_table(drafter, target.name, findings))
    wrong = [f"{finding.check}: {finding.detail}" for finding in findings if finding.failed]
    if wrong:
        many = f"{len(wrong)} check{'s' * (len(wrong) > 1)}"
        raise ValueError(f"{drafter} breaks its contract in {many}: {'; '.join(wrong)}")
    counts = Counter(finding.status for finding in findings)
    said = f"it passes {counts[Status.PASSED]} checks, and {counts[Status.NOT_APPLICABLE]} more do not apply"
    terminal.say(terminal.console(), f"{drafter} keeps its contract: {said}.")
    return findings


def _check_verifier(config: DictConfig) -> list[Any]:
    """Try a rule on every case that it takes; a wrong promise is an error."""
    from experiments.measuring.exactness import LAWS, cases
    from specdec.engine.parts import check_component, check_declared

    rule: Verifier = build(config, "verifier")
    check_component("verifier", rule)
    check_declared(rule)
    sizes = (config.vocab, config.tables, config.seed, list(config.temperatures))
    with Console(stderr=True).status("drafts") as status:
        done = list(cases(rule, *sizes, streams=config.streams, advance=status.update))
    if not done:
        tried = ", ".join(law.name.lower() for law in LAWS)
        raise ValueError(f"{type(rule).__name__} takes none of the drafts that are tried: chains and trees, {tried}")
    console = terminal.console(80)  # so narrow are the tables, in a file or pipe, too
    terminal.show(console, checks.exactness_table(rule, done))
    console.print((_shared_verdict if rule.noise is Noise.SHARED else _verdict)(rule, done, config))
    return done


def _verdict(rule: Verifier, done: Sequence[Any], config: DictConfig) -> str:
    """The verdict in words; a broken promise is an error."""
    name, worst = type(rule).__name__, max(done, key=lambda case: case.tv)
    where = f"{worst.shape}, {worst.law.name}, {worst.rows} tables, temperature {worst.temperature:g}"
    words, exact = "exact", worst.tv < config.threshold
    if not exact and rule.exactness is not Exactness.LOSSY:
        raise ValueError(
            f"{name} says that it is {rule.exactness.value} and is not: total variation {worst.tv:.3g} ({where})"
        )
    if not exact:
        words = f"not exact: total variation up to {worst.tv:.3g} ({where})"
    elif rule.exactness is Exactness.EXACT_WRT:
        distance = max(case.target_tv for case in done)
        words += f" with respect to the distribution that it states, which is up to {distance:.3g} from the target's"
    return f"{name} is {words}, over {len(done)} cases. It says of itself: {rule.exactness.value}."


def _shared_verdict(rule: Verifier, done: Sequence[Any], config: DictConfig) -> str:
    """The same of a rule with shared noise."""
    from experiments.measuring.exactness import SHARED_LEVEL

    name = type(rule).__name__
    differing, p_value = sum(case.differing for case in done), min(case.p_value for case in done)
    if differing or p_value < SHARED_LEVEL:
        raise ValueError(
            f"{name} says that its noise is shared, and {differing} outputs are not those of plain decoding, whose "
            f"law fits the target's with a p-value of {p_value:.2g}"
        )
    return (
        f"{name} is exact by its own check: over {len(done)} cases of {config.streams} seeds each, no output differs "
        f"from plain decoding's, which follows the target (smallest p-value {p_value:.2g}). "
        f"It says of itself: {rule.exactness.value}, noise {rule.noise.value}."
    )


def _inspect(config: DictConfig) -> Any:
    """Inspect a trained drafter, and print facts, acceptance, and the verdict."""
    from drafters.heads.files import Checkpoint
    from experiments.inspecting.acceptance import facts_of, prompts_of, trained_on
    from experiments.inspecting.mistakes import check_one_model, inspect

    if config.drafter.get("_target_") is None:
        config.drafter = _by_its_files(config.drafter.get("name"))
    check_components(config, {"": "drafter"}, ("target",))
    options, first = plain(config, "drafter"), build(config, "drafter")
    check_one_model(first.describe())
    chain = {"shape": config.depths or min(first.max_depth, _DEEPEST), "sampling": "iid"}
    target: Target = build(config, "target")

    def make(settings: Mapping[str, Any]) -> Drafter:
        changed: Any = OmegaConf.to_container(config.drafter)
        return build(OmegaConf.create({**config, "drafter": {**changed, **chain, **settings}}), "drafter")

    name, trained = options.get("name") or target.model.config.name_or_path, None
    if name and (Path(name).is_dir() or not Path(name).exists()):
        where = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
        with suppress(ValueError):  # it has no config.json
            checkpoint = Checkpoint(name, **{key: options[key] for key in where if options.get(key) is not None})
            trained = trained_on(checkpoint)
    title = f"{type(first).__name__} {options.get('name') or ''}".strip()
    with steps_shown("the target writes") as say:
        found = inspect(
            make,
            target,
            prompts_of(target, config.prompts, config.seed),
            tokens=config.tokens or 48,
            seed=config.seed,
            given=[name for name in ("hidden_layers", "mask_token_id") if options.get(name) is not None],
            progress=lambda text: say(f"trying: {text}"),
        )
    facts = facts_of(found.drafter, target, found.loaded.frequencies)
    table = checks.facts_table(f"{title}, inspected with {target.name}", facts)
    terminal.show(terminal.console(), table, checks.tried_table(found) if found.tried or found.refused else None)
    terminal.say(terminal.console(), *checks.inspected(title, target.name, found, trained))
    return found


def _by_its_files(name: str | None) -> DictConfig:
    """The section of a drafter whose files say what kind it is."""
    import drafters
    from experiments.exporting.folders import KINDS, kind_of

    if name is None:
        raise ValueError("drafter=none drafts nothing that could be inspected: give another drafter, or a folder")
    kind = KINDS[kind_of(name)]
    makers = [getattr(drafters, each) for each in dir(drafters)]
    maker = next(each for each in makers if kind in getattr(each, "public", ()))
    options = sections("drafter", None).values()
    section = next(each for each in options if each.get("_target_", "").endswith(f".{maker.__name__}.from_pretrained"))
    section.name = name
    return section
