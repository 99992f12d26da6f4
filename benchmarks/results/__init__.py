"""A checkpoint finetuned on standard tasks, beside the paper's figures."""
