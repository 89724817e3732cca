"""What will a model cost on a device? ``python -m experiments.plan target.name=… device=h100``."""

from experiments.config.launch import Command

plan = Command("plan")
main = plan.main

if __name__ == "__main__":
    main()
