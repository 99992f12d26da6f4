"""The paper's ablations at small scale."""
