"""An endpoint for standard clients: ``python -m experiments.serve drafter=model port=8000``."""

from experiments.commands.settings import serve

if __name__ == "__main__":
    serve.main()
