"""A random search for settings that do not train as plain PyTorch does: ``python -m tests.search --help``."""
