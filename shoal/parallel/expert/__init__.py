"""Expert parallelism: the experts of a layer divided among ranks, and tokens sent to those that hold their experts."""
