"""An engine under load: ``python -m experiments.load workload=chat arrival=poisson rates=[1,2,4] sla.ttft=0.5``.

Plain decoding and a method are given the same requests at the same moments, one after the other. The tables and
pictures say who waited, for how long, and how many requests kept the limits.
"""

from experiments.config.launch import Command

load = Command("load")
main = load.main

if __name__ == "__main__":
    main()
