"""The cost of a model on a device, before it is there: ``python -m experiments.plan target.name=… device=h100``."""

from experiments.config.launch import Command

plan = Command("plan")
main = plan.main

if __name__ == "__main__":
    main()
