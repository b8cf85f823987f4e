"""Arrays of your own as a stream of tasks: any uint8 images and labels will do, and so does a folder of pictures."""

import numpy as np

import gracecl

generator = np.random.default_rng(0)
patterns = generator.integers(0, 200, (6, 16, 16, 3))
labels = np.repeat(np.arange(6), 60)
images = (patterns[labels] + generator.integers(0, 55, (360, 16, 16, 3))).astype(np.uint8)
train = np.arange(360) % 6 != 0
data = gracecl.from_arrays(images[train], labels[train], images[~train], labels[~train], name="mine")
stream = gracecl.stream(data, tasks=3, batch=10)

learner = gracecl.Learner("er", classes=6, shape=(3, 16, 16), net="resnet18(width=4)", memory=60)
accuracy = learner.fit(stream).evaluate(stream)
print(f"er: {accuracy.overall:.0f} % right after three tasks of two classes; by task:", accuracy.per_task)
