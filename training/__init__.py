"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation. Run from a checkout."""

from training.requirements import PACKAGES, check_packages

check_packages(*PACKAGES)
