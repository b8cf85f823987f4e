"""A method of your own: replay whose softmax spans only the classes met so far. It is checked and run like any other."""

from dataclasses import dataclass

from gracecl import Learner
from gracecl.functional.losses import cross_entropy
from gracecl.methods.er import ER
from gracecl.registry import methods
from gracecl.testing import check_method, feed, toy_stream


@methods.register("er_seen")
@dataclass(eq=False, repr=False)
class ERSeen(ER):
    """Experience replay over the classes met so far."""

    def losses(self, out, batch):
        return {"ce/all": cross_entropy(out.logits, batch.y, batch.seen)}


check_method("er_seen()")  # every law, alone and under grace(...)
learner, data = Learner("grace(er_seen(n_recall=16))", classes=6, shape=(1, 8, 8), net="mlp", memory=30), toy_stream().data
feed(learner.engine, toy_stream())
print(f"{(learner.predict(data.test_x) == data.test_y).mean():.0%} right after three tasks of two classes")
