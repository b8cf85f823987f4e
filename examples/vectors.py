"""Feature vectors: scikit-learn's digits as 64 floats, five tasks of two digits, replay with layer-wise feedback."""

import numpy as np
from sklearn.datasets import load_digits

import gracecl

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
test = np.arange(len(y)) % 5 == 0
data = gracecl.from_arrays(x[~test], y[~test], x[test], y[test])
stream = gracecl.stream(data, tasks=5)
learner = gracecl.Learner("grace(er())", memory=200, net="mlp(width=64, depth=2)").fit(stream)
print(f"{learner.evaluate(stream).overall:.0f} % of the test digits after one pass over five tasks")
