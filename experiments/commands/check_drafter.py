"""A drafter tried against its contract, and what is printed about it."""

from collections import Counter

from omegaconf import DictConfig

from experiments.config.pairs import check_files
from experiments.config.sections import build, plain
from experiments.reporting import terminal
from experiments.reporting.checks import drafter_table
from experiments.reporting.progress import steps_shown
from experiments.session.engines import settle
from experiments.session.methods import check_components
from experiments.session.policies import paced
from specdec.checks.drafter import Finding, Status
from specdec.checks.drafter import check_drafter as tried
from specdec.interfaces import Drafter
from specdec.target.target import Target
from specdec.types import DraftSampling
from verifiers import RejectionVerifier, SharedNoiseVerifier
from verifiers.exact import exact_rules


def check_drafter(config: DictConfig) -> list[Finding]:
    """Try the drafter of a checked configuration; print a line per check and the verdict. A failed one is an error."""
    settle(config)
    check_components(config, {"": "drafter"}, ("target", "sampling"))
    name = config.drafter.get("_target_")
    check_files(config)
    engine = plain(config, "engine")
    sampling = build(config, "sampling")
    target: Target = build(config, "target")

    def make() -> Drafter:
        drafter = paced(build(config, "drafter"), build(config, "policy"))
        assert drafter is not None, "refused above"
        return drafter

    with steps_shown("drafter") as say:
        findings = tried(
            make,
            target,
            verifier=SharedNoiseVerifier() if DraftSampling.COUPLED in make().laws else RejectionVerifier(),
            rules=exact_rules() if config.every_rule else (),
            prompts=config.prompts,
            sampling=sampling,
            tokens=config.tokens or 24,
            rounds=config.rounds,
            draws=config.draws,
            max_length=engine["max_length"],
            options={name: engine.get(name) for name in ("attention", "optimize", "kv_cache")},
            progress=say,
        )
    drafter = name.removesuffix(".from_pretrained").rpartition(".")[2]
    console = terminal.console()
    terminal.show(console, drafter_table(drafter, target.name, findings))
    counts = Counter(finding.status for finding in findings)
    wrong = [finding for finding in findings if finding.failed]
    if wrong:
        checks = "; ".join(f"{finding.check}: {finding.detail}" for finding in wrong)
        many = "1 check" if len(wrong) == 1 else f"{len(wrong)} checks"
        raise ValueError(f"{drafter} breaks its contract in {many}: {checks}")
    other = f"{counts[Status.NOT_APPLICABLE]} more do not apply"
    terminal.say(console, f"{drafter} keeps its contract: it passes {counts[Status.PASSED]} checks, and {other}.")
    return findings
