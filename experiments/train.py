"""Train a drafter for a target: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``."""

from experiments.config.launch import Command

train = Command("train", divides=True)
main = train.main

if __name__ == "__main__":
    main()
