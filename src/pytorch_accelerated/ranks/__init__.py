"""How a run becomes several processes."""
