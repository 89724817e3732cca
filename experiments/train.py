"""Train a drafter: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``."""

from experiments.commands.settings import train

if __name__ == "__main__":
    train.main()
