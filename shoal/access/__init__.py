"""Access to sharded parameters from outside of the engine: ``Init``, ``GatheredParameters`` and the safe accessors."""
