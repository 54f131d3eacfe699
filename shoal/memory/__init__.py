"""Where bytes lie: placement, layout, pool."""
