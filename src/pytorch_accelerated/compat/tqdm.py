"""Imports `tqdm.auto` without its warning, before accelerate does.

In a notebook without ipywidgets it warns in red of bars that neither this library nor accelerate shows there.
"""

import warnings

import tqdm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", tqdm.TqdmWarning)
    import tqdm.auto
