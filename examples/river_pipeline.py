"""A learner in a river pipeline: question, then answer, item by item; and with labels that come fifty items late.

River does not score items that come before any label, so the second accuracy leaves out the first fifty.
"""

from river import datasets, evaluate, metrics, preprocessing

from gracecl.river import Classifier

for delay in (None, 50):
    learner = Classifier("er(n_recall=10)", net="mlp(width=32, depth=1)", optimizer="adam(lr=0.01)", memory=200, device="cpu")
    model = preprocessing.StandardScaler() | learner
    items = datasets.ImageSegments().take(600)
    accuracy = evaluate.progressive_val_score(items, model, metrics.Accuracy(), delay=delay)
    print(f"labels {'at once' if delay is None else f'{delay} items later'}: {accuracy}")
