"""Other engines, measured in the same run, on the same prompts and with the same counters as this one."""
