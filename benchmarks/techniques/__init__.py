"""What each technique of the library changes, beside plain training on the same work."""
