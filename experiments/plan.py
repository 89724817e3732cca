"""What will a model cost on a device? ``python -m experiments.plan target.name=… device=h100``.

Answers from the model's ``config.json`` alone: how much memory it takes and how many rows fit, what bounds each phase,
the least time of every step, how long to draft and what that brings, where speculation stops paying, what a request and
a million tokens cost. No weights are loaded, and no GPU is needed.
"""

from experiments.config.launch import Command

plan = Command("plan")
main = plan.main

if __name__ == "__main__":
    main()
