"""Labels that arrive over time: the learner is told neither the classes nor the shape of its images.

Handwritten digits come task by task, with names for labels. The head grows when a name is new; a learner that was saved goes on
learning new names.
"""

import tempfile
from pathlib import Path

import gracecl

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

stream = gracecl.stream("split-digits(size=8, tasks=5)", seed=0)
learner = gracecl.Learner("er", memory=100, net="mlp(width=64)", augment="none")
print(learner.predict(stream.batch(0).x[:2], default="unknown"))  # nothing was learned yet

with tempfile.TemporaryDirectory() as folder:
    for step in range(len(stream)):
        batch = stream.batch(step)
        learner.learn(batch.x, [NAMES[label] for label in batch.labels])
        if batch.last_of_task:
            learner.save(Path(folder) / "learner")
            learner = gracecl.Learner.load(Path(folder) / "learner")
            print(learner)

names = [NAMES[label] for label in stream.data.test_y]
accuracy = learner.evaluate(stream.data.test_x, names).overall
print(f"{accuracy:.1f} % of the test images; the first five are {', '.join(learner.predict(stream.data.test_x[:5]))}")
print(dict(zip(learner.classes_, learner.predict_proba(stream.data.test_x[:1])[0].round(2).tolist(), strict=True)))
