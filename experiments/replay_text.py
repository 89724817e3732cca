"""Look-ups on texts whose answers are known: ``python -m experiments.replay_text texts=spec_bench.jsonl``.

Drafters that need nothing of a target's model are given every prompt, and then its answer, round by round. What they
draft is compared with the answer, and the answer is what is emitted (*teacher forcing*). So the mean acceptance length
is that of a greedy target that would answer exactly so: any target whose answers are in a file, without its weights.
"""

from experiments.config.launch import Command

replay_text = Command("replay_text")
main = replay_text.main

if __name__ == "__main__":
    main()
