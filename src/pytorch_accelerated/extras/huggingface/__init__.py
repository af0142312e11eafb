"""What few runs of the Hugging Face trainer need: each file is loaded by the first call that does."""
