"""The recipe's settings (``conf/bundle.yaml``)."""

from dataclasses import dataclass

from experiments.training.fitting import Schedule


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """A Llama's size, in the words of ``LlamaConfig``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: how many tokens it has."""

    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model and how it is trained."""

    model: LlamaSize
    fit: Schedule


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Medusa heads and how they are trained."""

    num_heads: int
    fit: Schedule


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Text that the target writes, for the drafters to learn from.

    Attributes:
        count: Windows in all.
        batch_size: Windows per call.
        prompt_length: Tokens of training text that each window begins with.
        length: Tokens per window, the prompt included.
        greedy_fraction: Share of the windows that is decoded greedily; the rest is sampled at temperature 1.
    """

    count: int
    batch_size: int
    prompt_length: int
    length: int
    greedy_fraction: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of the recipe.

    Attributes:
        out: Folder of the finished models.
        work: Folder of the training state; a second call goes on from it.
        stages: Which stages to run.
        seed: Seed of everything random.
        threads: CPU threads.
        mixed_precision: As accelerate takes it: ``"bf16"``, or ``"no"`` for float32.
        tokenizer, target, samples, drafter, medusa: Each stage's own settings.
        heads: Folders of trainings whose best weights the stage ``heads`` installs, by the name that each gets.
    """

    out: str
    work: str
    stages: tuple[str, ...]
    seed: int
    threads: int
    mixed_precision: str
    tokenizer: TokenizerConfig
    target: ModelConfig
    samples: SamplesConfig
    drafter: ModelConfig
    medusa: MedusaConfig
    heads: dict[str, str | None]
