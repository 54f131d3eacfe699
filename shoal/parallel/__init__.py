"""What spreads one model's work over ranks and memories beside ZeRO: so far, activations that are recomputed."""
