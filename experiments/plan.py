"""The cost of a model on a device: ``python -m experiments.plan target.name=… device=h100``."""

from experiments.commands.settings import plan

if __name__ == "__main__":
    plan.main()
