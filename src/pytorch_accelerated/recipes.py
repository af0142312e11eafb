"""The names of `extras.recipes`, for scripts."""

from pytorch_accelerated.extras.recipes import CrossValidation, cross_validate, fine_tune

__all__ = ["CrossValidation", "cross_validate", "fine_tune"]
