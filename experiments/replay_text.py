"""Look-ups on texts whose answers are known: ``python -m experiments.replay_text texts=spec_bench.jsonl``."""

from experiments.config.launch import Command

replay_text = Command("replay_text")
main = replay_text.main

if __name__ == "__main__":
    main()
