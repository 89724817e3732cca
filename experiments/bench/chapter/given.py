"""What the chapter takes from elsewhere: sizes of its examples, and what others have measured or say."""

from dataclasses import dataclass

from specdec.physics.rounds import AffineCost, AffineRounds


@dataclass(frozen=True)
class Given:
    """Numbers that are chosen, not computed.

    Attributes:
        prompt: Tokens of the short request's prompt.
        output: Tokens of its output.
        long_prompt: Tokens of the prompt that a 70B model reads.
        long_request: Prompt and output of a request to it.
        very_long: Tokens of a very long document.
        short_prompt: Tokens of a prompt that is too short to be bound by compute.
        batches: Rows of a batch, in tables.
        context: Positions per row where speculation is worked out.
        acceptance: Probability that a drafted token is accepted.
        low_acceptance: A lower one.
        fixed_draft: Tokens of a draft whose length does not follow the load.
        mfu: What prefill usually reaches of the peak, from and to.
        reached: What decoding of good engines usually reaches of the bound, from and to.
        published_batch: The largest batch of the measurements behind the fitted constants.
        disk: Bytes per second of a fast disk.
        launch: Seconds that launching a kernel takes, from and to.
        kernels_per_layer: Kernels that a layer launches without fusing, about.
        overhead: Memory beyond weights, cache and activations, as a share, from and to.
        activations: Bytes of activations for a small model, from and to.
        mfu_example: FLOP/s that somebody has reached, and the peak that they had.
        mbu_example: Bytes per second that somebody has reached, and the peak that they had.
        tpot_limit: Seconds per token that readers of a stream take for fluent, from and to.
        ordinary_latency: Seconds that one answer of an ordinary model takes, from and to.
        llm_latency: Seconds that one answer of a language model takes, from and to.
        ordinary_price: Price of an ordinary model's answer.
        llm_price: Price of a language model's answer, from and to.
        gpu_price: Price of a device's hour in the examples.
    """

    prompt: int = 1000
    output: int = 100
    long_prompt: int = 4096
    long_request: int = 4608
    very_long: int = 100_000
    short_prompt: int = 256
    batches: tuple[int, ...] = (1, 8, 32, 128, 512)
    context: int = 1024
    acceptance: float = 0.7
    low_acceptance: float = 0.5
    fixed_draft: int = 3
    mfu: tuple[float, float] = (0.5, 0.7)
    reached: tuple[float, float] = (0.6, 0.85)
    published_batch: int = 128
    disk: float = 7e9
    launch: tuple[float, float] = (5e-6, 10e-6)
    kernels_per_layer: int = 10
    overhead: tuple[float, float] = (0.1, 0.2)
    activations: tuple[float, float] = (0.5e9, 1e9)
    mfu_example: tuple[float, float] = (300e12, 990e12)
    mbu_example: tuple[float, float] = (2.5e12, 3.35e12)
    tpot_limit: tuple[float, float] = (0.05, 0.1)
    ordinary_latency: tuple[float, float] = (0.005, 0.02)
    llm_latency: tuple[float, float] = (0.1, 10.0)
    ordinary_price: float = 0.001
    llm_price: tuple[float, float] = (0.01, 0.1)
    gpu_price: float = 2.0


GIVEN = Given()

ACCEPTANCES = (0.5, 0.7, 0.8, 0.9)
BATCHES = (1, 8, 32, 64, 128, 256, 512)
CONTEXTS = (256, 1024, 4096, 16_384)
LONGEST = 8
"""What speculation is worked out for: acceptance, rows, positions per row, drafts of up to so many tokens."""

VLLM_8B = AffineRounds(
    target=AffineCost(fixed=5.88590713e-3, per_token=2.10103129e-5, per_position=3.92645679e-8),
    drafter=AffineCost(fixed=2.13526175e-3, per_token=8.41429603e-7, per_position=2.37768493e-9),
    outside=1.20683946e-3,
)
"""Constants that were fitted to measured steps of Llama-3.1-8B with an EAGLE head in vLLM on an H100. They are
published in the simulator of "Speculative decoding: performance or illusion?" (arXiv 2601.11580)."""
