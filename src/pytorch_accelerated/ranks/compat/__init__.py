"""Every use of a private member of another library: a file for torch, one for accelerate, `extras` for optional ones.

Each function says what it does and why nothing public does it. A test in ``tests/compat`` fails by the function's name
when a new version of the library has dropped or changed what the function uses.
"""
