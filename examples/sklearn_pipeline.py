"""A learner in a scikit-learn pipeline, and one that goes on with classes that nobody declared."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gracecl.sklearn import OnlineClassifier

x, y = load_digits(return_X_y=True)
small = {"net": "mlp(width=64, depth=1)", "memory": 300, "device": "cpu"}
model = make_pipeline(StandardScaler(), OnlineClassifier("er", **small, batch=50, epochs=5))
print(f"{100 * cross_val_score(model, x, y, cv=3).mean():.0f} % of the digits, cross-validated")

online, test = OnlineClassifier("er", **small), np.arange(len(y)) % 5 == 0
for first in range(0, 10, 2):
    task = np.isin(y, [first, first + 1]) & ~test
    online.partial_fit(x[task] / 16, y[task])
    known = np.isin(y, online.classes_) & test
    print(f"{100 * online.score(x[known] / 16, y[known]):.0f} % of the test digits of the classes {online.classes_.tolist()}")
