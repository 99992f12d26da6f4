"""Training of ALBERT: vocabulary, pretraining, finetuning, evaluation."""

from training.requirements import PACKAGES, check_packages

check_packages(*PACKAGES)
