"""Scripts that clients of DeepSpeed run: the same file under DeepSpeed and under Shoal."""
