"""gracecl: online continual learning with layer-wise feedback."""
