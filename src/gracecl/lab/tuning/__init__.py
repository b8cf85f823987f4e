"""Hyperparameter search that is legal in continual learning: on the training images of the first tasks alone."""
