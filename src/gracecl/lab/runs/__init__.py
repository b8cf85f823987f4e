"""A run: its configuration, its folder, the loop over a stream, checkpoints, progress, and many runs side by side."""
