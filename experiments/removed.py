"""Commands and options that this release no longer has, and what replaces each: kept for this release."""

COMMANDS = {
    "accuracy": "run experiment=accuracy grading.tasks=gsm8k drafter=model compares answers",
    "bundle": "python examples/bundle.py trains and installs the bundled models",
    "calibrate": "plan costs=fit drafter=model fits the costs of steps on this machine",
    "corpus": "python examples/corpus.py OUT FILES makes a corpus",
    "export": "train export=FOLDER format=speculators out=FOLDER writes a trained drafter for a serving engine",
    "inspect_drafter": "check FOLDER, or check inspect=true drafter=eagle, inspects a drafter",
    "optimize_tree": "replay TRACE best=tree finds the best tree",
    "parity": "python examples/parity.py compares forwards of k + 1 tokens with those of one",
    "pays": "plan costs=timed says from which acceptance on speculation pays on this machine",
    "replay_text": "run with dataset=… and several drafters measures retrieval drafters",
    "report": "compare FOLDER format=html writes runs as one HTML page",
    "show": "compare FOLDER format=html shows outputs and draft trees token by token",
}
"""Sentences by the name of a command, each after "give" in a user's head: what to call now."""
OPTIONS = {
    "load engine.cache.states": "leave it out: requests on recurrent targets share no beginnings",
    "run engine.cache.states": "leave it out: requests on recurrent targets share no beginnings",
    "load scheduler=fair": "give scheduler=priority, with a level per user",
    "load memory": "give every method its pages, as in setups.plain.engine.cache.pages=…",
    "load replicas": "give target.tensor_parallel, or start several serve behind any balancer",
    "load affinity_margin": "an engine is one process; any balancer can stand before several serve",
    "load engine=openai": "measure a server with vllm bench serve, and give its JSON to compare",
    "load contender=openai": "measure a server with vllm bench serve, and give its JSON to compare",
    "load clock=record": "give run trace=true, and its folder as clock.traces",
    "load clock=both": "play clock=real and clock=virtual into two folders, and compare them with allow_mixed=true",
    "load clock.mixed": "leave it out: pieces of prompts share a forward with rounds by published costs of vLLM",
    "load clock.shape": "the tree is the trace's: record it with drafter.shape",
    "load policy=margin_replay": "give policy=cost_aware",
    "load policy=off_above": "give policy=table, with 0 for many rows",
    "run policy=off_above": "give policy=table, with 0 for many rows",
    "load policy=tiers": "give policy=cost_aware, or policy=additive",
    "run policy=tiers": "give policy=cost_aware, or policy=additive",
    "run drafter.search": "python examples/skip_search.py TARGET skip.json searches, for drafter.skip=skip.json",
    "run drafter.any_target": "leave it out: a head is refused only where its sizes do not fit",
    "run drafter.shared_requests": "give drafter.shared_tokens",
    "run drafter.corpus_tree": "give drafter=rest for trees of a corpus",
    "train head.markov_rank": "give head.config.markov_rank; other fields of a block head, too, stand in head.config",
    "train head.causal": "give head.config.causal",
    "train head.confidence": "give head.config.confidence",
    "train head.sliding_window": "give head.config.sliding_window, use_sliding_window and layer_types",
    "train head.detached": "leave it out: the gradient goes through all steps",
    "train head.output_from_target": "leave it out: a new output layer begins as the target's",
    "load experiment=load_traces": "give run trace=true, then load clock=virtual",
    "load experiment=load_pair": "give run trace=true, then load clock=virtual",
    "run contender=mlx": "compare mlx_lm.server by +contender=openai",
    "run target.quantization=int8_compact": "give int8, which keeps no copies of the weights any more",
    "run target.quantization=int4_compact": "give int4, which keeps no copies of the weights any more",
    "load arrival=batch": "give arrival=constant arrival.rate=1e6: all requests come at once",
    "load arrival=diurnal": "give arrival=spike, arrival=gamma, or arrival=trace with a day's traffic",
    "load arrival=ramp": "give rates=[1,2,4], which goes through rates one after the other",
    "load seconds": "give requests, as many as come in that time; arrival.window cuts a trace",
    "load lengths.too_long": "requests that are too long are cut; give a higher engine.max_length or lengths.scale",
    "load clock.seeds": "give more requests, or sweep seed and compare the folders",
    "load clock.workers": "sweep rates with -m and a launcher",
    "bench chapter": "plan computes the chapter's numbers for your model and device",
    "bench evidence": "run the command that a table or picture of the documentation names",
    "bench gpu": "give device=cuda; make gpu runs the tests that need a GPU",
    "bench speed": "give parts=[rounds], and against=COMMIT for another checkout",
    "bench engine": "give parts=[steps,rounds]",
    "bench verifiers": "replay compares rules on real drafts",
    "bench load": "load measures schedules and pages under arrivals",
    "bench virtual": "load clock=virtual plays loads in virtual time",
    "plan page": "pages hold as many positions as a run's engine.cache says",
    "run progress_every": "leave it out: without a terminal a line is written every 30 seconds",
    "train progress_every": "leave it out: without a terminal a line is written every 30 seconds",
    "run time_limit": "give dataset.count and sampling.max_new_tokens",
    "run costs": "plan costs=fit tries its constants at held-out sizes; policies take the file with policy.costs",
    "run dataset.too_long=fail": "skip leaves long prompts out, cut shortens them",
    "run race_tokens": "the race has 96 tokens",
    "run ladder": "methods and setups measure several in one run; read the speedups in its table",
    "run experiment=quadrants": "sweep dataset.tokens and sampling.max_new_tokens",
    "run experiment=ingredients": "give methods and setups in one run",
    "run tracker=accelerate": "give tracker=wandb, or a tracker of your own",
    "audit sampling.temperature=0": "a run compares greedy outputs with plain decoding's, token by token",
    "audit reference": "sampled outputs are held against the law by the target's weights",
    "audit shift": "least says how small a mistake has to be seen",
    "check max_minutes": "a check says which case it is at; give a smaller vocab where it takes too long",
    "check every_rule": "check verifier=… tries a rule, and audit drafter=… verifier=… their outputs",
    "check contexts": "run experiment=context measures acceptance by length of the context",
    "plan ranges": "leave it out: the ranges of the device's kernels are fitted",
    "replay costs=measure": "give costs=FILE of plan costs=fit; without, the tree with the most tokens is the best",
    "replay costs=none": "leave it out: without costs the tree with the most tokens is taken",
    "replay rounds": "give costs=FILE of plan costs=fit: replay times no rounds itself",
    "replay old": "measure trees beside each other: run drafter=none +drafter@methods.old=model +drafter@methods.new=…",
    "replay measure": "give the tree to a run: run drafter=… tree=NAME --config-dir FOLDER",
    "compare published": "put a published length beside the row of comparison.csv",
    "compare width": "a half-width falls with the root of the number of prompts: four times as many halve it",
    "run bootstrap.width": "a half-width falls with the root of the number of prompts: four times as many halve it",
    "load bootstrap.width": "a half-width falls with the root of the number of prompts: four times as many halve it",
    "compare exports": "records.jsonl of a run has the tokens that every round accepted and proposed",
}
"""Sentences by a command and a setting of it, or a setting with its value."""


def command(name: str) -> str | None:
    """What replaces a command; None for one that was never there."""
    return COMMANDS.get(name.replace("-", "_"))


def option(name: str, word: str) -> str | None:
    """What replaces the setting that a word of a command's line sets; None for any other word."""
    word = word.lstrip("+~")
    return OPTIONS.get(f"{name} {word}") or OPTIONS.get(f"{name} {word.partition('=')[0]}")


def refuse(words: list[str]) -> None:
    """End ``python -m experiments.NAME`` with a sentence if there is no such command any more."""
    if words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("experiments."):
        name = words[2].removeprefix("experiments.")
        if (instead := command(name)) is not None:
            raise SystemExit(f"error: there is no command {name} any more: {instead}")
