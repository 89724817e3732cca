"""The columns of the frames that ``results.load`` makes, and their types. docs/measurements.md says what they mean.

A name with ``*`` stands for as many columns as the runs have: one per position of the draft, package or setting.
"""


def _columns(text: str) -> dict[str, str]:
    """Columns by name, from lines of a type and the columns of that type, in the frame's order."""
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: kind for kind, _, names in lines for name in names.split()}


RUNS = _columns("""\
string: run method exactness
float64: temperature
bool: complete
int64: planned finished failed tokens rounds
float64: confidence mean_acceptance_length mean_acceptance_length_low mean_acceptance_length_high
float64: expected_mean_acceptance_length draft_acceptance_rate proposed_depth_per_round proposed_nodes_per_round
float64: distance_tv distance_tv_low distance_tv_high distance_kl noise_spread other_cores
boolean: noisy
int64: timed_prompts
float64: seconds tokens_per_second speedup speedup_low speedup_high distinct_4_gram_rate
float64: wasted useful_mfu predicted_error
float64: requests_per_second total_tokens_per_second user_tokens_per_second concurrency waiting attainment goodput
float64: device_hours_per_million_tokens price_per_million_tokens joules_per_token
Int64: equal_to_plain compared_with_plain
string: lossless
Int64: divergences unexplained
float64: largest_margin tie_bound
string: target
Int64: parameters
string: dtype device
Int64: threads
string: system processor gpus
Int64: prompts
string: prompts_hash
datetime64[us, UTC]: started
string: git_commit
boolean: git_dirty
string: overrides
float64: stage_seconds.* mbu.* mfu.*
float64: ttft.* engine_ttft.* queue.* tpot.* chunk_gap.* token_gap.* e2e.* phase_share.* stage_share.*
Int64: finish.*
float64: acceptance_at.* conditional_acceptance_at.*
Int64: rounds_at.*
string: version.* override.*
any: config.*
""")

PROMPTS = _columns("""\
category: run method exactness
float64: temperature
string: prompt
category: category
int64: turn sample batch prompt_tokens tokens rounds accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: mean_acceptance_length batch_seconds ingestion arrived admitted prefilled first_token finished
float64: ttft engine_ttft tpot e2e
category: finish_reason
bool: failed
string: error
boolean: equals_plain
Int64: divergence
float64: margin tie_bound
string: text
""")

ROUNDS = _columns("""\
category: run method
float64: temperature
category: prompt category
int64: turn sample round accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: distance_tv distance_kl seconds predicted_seconds emitted_at
Int64: emitted
""")
