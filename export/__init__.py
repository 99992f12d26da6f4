"""Export of a Hugging Face checkpoint to a bundle for `albert_serve`.

python -m export CHECKPOINT BUNDLE_DIR
"""

from training.requirements import check_packages

check_packages("onnx")
