"""What a configuration costs before it runs, and which one to choose."""
