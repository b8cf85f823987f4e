"""Pure functions: losses, augmentation, metrics, randomness as a function of the step, optimisers by name."""
