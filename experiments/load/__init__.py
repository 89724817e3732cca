"""Requests that arrive over time: arrivals, workloads, the driver, and what it saw."""
