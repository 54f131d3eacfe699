"""The first day with a GPU: checks of what nobody could check without one, and one page of what held.

    python -m benchmarks.first_gpu --out runs/first-gpu.md

Each module is one check and a program of its own; ``__main__`` runs them in turn, each in a process with a time limit.
"""
