"""An accelerator simulated on the CPU, and the check that its streams wait for each other where they must."""
