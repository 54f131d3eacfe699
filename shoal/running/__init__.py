"""Runs the table: hooks, the order of the units, the runtime, the reducer and the step."""
