"""From a Hugging Face checkpoint to the bundle that `albert_serve` opens.

python -m export CHECKPOINT_DIR BUNDLE_DIR
"""
