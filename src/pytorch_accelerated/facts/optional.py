"""Imports an optional package at its first use, or says how to install it."""

import importlib
from types import ModuleType

from pytorch_accelerated.errors import MissingDependencyError


def require(module: str, *, needed_by: str) -> ModuleType:
    """Import `module` now.

    Args:
        module: dotted name of the module to import.
        needed_by: the feature that needs it, the subject of the error message.

    Raises:
        MissingDependencyError: if the package is not installed. A package that is installed but fails to import
            one of its own dependencies raises its own error instead.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # installed, but one of its own imports is broken: a different problem
        raise MissingDependencyError(
            f"{needed_by} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        ) from error
