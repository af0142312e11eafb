"""What ``python -m pytorch_accelerated`` runs."""
