"""An endpoint for standard clients: ``python -m experiments.serve drafter=model engine.max_batch_size=8 port=8000``."""

from experiments.config.launch import Command

serve = Command("serve")
main = serve.main

if __name__ == "__main__":
    main()
