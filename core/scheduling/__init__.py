"""Scheduling: the requests that are admitted, run or wait, and the content of a step."""
