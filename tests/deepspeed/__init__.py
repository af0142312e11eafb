"""Tests of `extras.deepspeed`."""
