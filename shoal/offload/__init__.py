"""State in host memory and on disks: the CPU optimizer, the disk state, and the policy that chooses tiers."""
