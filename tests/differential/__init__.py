"""The reference package and ours, driven by the same scripts. What differs is listed with reasons; the rest fails."""
