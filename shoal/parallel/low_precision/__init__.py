"""Linear layers whose matrix products are computed in 8 or 4 bits."""
