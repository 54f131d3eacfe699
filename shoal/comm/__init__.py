"""The seam to the other ranks: the only place that issues a collective, a send or a receive."""
