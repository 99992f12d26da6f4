"""Export of a Hugging Face checkpoint to a bundle for `albert_serve`.

albert-serve export CHECKPOINT BUNDLE_DIR
"""

from training import check_packages

check_packages("onnx")
