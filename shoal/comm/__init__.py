"""The seam to the other ranks: the only place that issues a collective."""
