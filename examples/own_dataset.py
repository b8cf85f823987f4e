"""Arrays of your own as a stream of tasks: any uint8 images and labels will do, and so does a folder of pictures."""

import numpy as np

from gracecl import Learner
from gracecl.data import from_arrays
from gracecl.streams.split import split
from gracecl.testing import feed

generator = np.random.default_rng(0)
patterns = generator.integers(0, 200, (6, 16, 16, 3))
labels = np.repeat(np.arange(6), 60)
images = (patterns[labels] + generator.integers(0, 55, (360, 16, 16, 3))).astype(np.uint8)
train = np.arange(360) % 6 != 0
data = from_arrays(images[train], labels[train], images[~train], labels[~train], name="mine", tasks=3)
stream = split(data, seed=0, tasks=3, batch=10)

learner = Learner("er", classes=6, shape=(3, 16, 16), net="resnet18(width=4)", memory=60)
feed(learner.engine, stream)
print(f"er: {(learner.predict(data.test_x) == data.test_y).mean():.0%} right after three tasks of two classes")
