"""Pages that show a run, or runs side by side."""
