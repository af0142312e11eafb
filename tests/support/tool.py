"""``python -m pytorch_accelerated`` without a process of its own."""

import runpy
import sys

import pytest


def run_tool(*words: object) -> int:
    """The exit code of a command. It prints as in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pytorch_accelerated", *map(str, words)])
        patch.delitem(sys.modules, "pytorch_accelerated.__main__", raising=False)  # runpy warns about a second one
        with pytest.raises(SystemExit) as end:
            runpy.run_module("pytorch_accelerated", run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code
