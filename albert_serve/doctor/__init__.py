"""What a bundle holds, and how it does on this machine: `albert-serve info` and `doctor`."""
