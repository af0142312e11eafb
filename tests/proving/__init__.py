"""Tests of `pytorch_accelerated.proving`."""
