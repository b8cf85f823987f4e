"""Pure functions: losses, augmentation, metrics, randomness as a function of the step, optimizers by name."""
