"""One step of a learner: images in, weights, memories and statistics moved; and how a learner predicts."""
