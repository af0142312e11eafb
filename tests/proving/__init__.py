"""Tests of `pytorch_accelerated.extras.proving`."""
