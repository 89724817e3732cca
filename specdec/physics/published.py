"""Costs of rounds that others have measured and published: for studies of devices that one does not have."""

from specdec.physics.rounds import AffineRounds
from specdec.physics.step_cost import StepCost

LLAMA_8B_H100 = AffineRounds(
    target=StepCost.affine(fixed=5.88590713e-3, per_token=2.10103129e-5, per_position=3.92645679e-8),
    drafter=StepCost.affine(fixed=2.13526175e-3, per_token=8.41429603e-7, per_position=2.37768493e-9),
    outside=1.20683946e-3,
    deepest=8,
)
"""Llama-3.1-8B with an EAGLE head in vLLM on an H100, in 16 bits, all rows packed into one forward.

The constants were fitted to measured steps of batches of 1 to 64, and are published in the simulator of "Speculative
decoding: performance or illusion?" (arXiv 2601.11580; github.com/SpecDecode-Bench/simulator, predictor.py at 2fdccbd).
What they say and what they leave out:

* A prompt costs as many tokens of the same formula. Attention within it is left out: 7 % of its work at 4,096 tokens.
* Drafting has no term for a level of the draft. So deeper drafts than the usual ones look too cheap: more than 8 tokens
  are refused. The simulator itself plays drafts of 1, 3 and 5.
* The simulator multiplies the drafter's constant per token by the tokens of one row. Here it is by those of all rows,
  which adds 0.4 ms to a round of 128 rows with 4 tokens each.
"""
