"""A model of timm under GRACE, on the digits that come with the package; needs: pip install 'gracecl[timm]'."""

import sys

import gracecl
from gracecl.data import load

digits = load("digits", size=32)
net = "timm('test_efficientnet')"  # a tiny model; timm('resnet18', pretrained=True) fetches one with weights
try:
    learner = gracecl.Learner("grace(er())", net=net, classes=10, shape=digits.shape, memory=100, augment="none")
except gracecl.UserError as error:
    sys.exit(str(error))
print("tapped at", *learner.net.backbone.names)
for start in range(0, 400, 10):
    learner.learn(digits.train_x[start : start + 10], digits.train_y[start : start + 10])
print(f"{learner.evaluate(digits.test_x, digits.test_y).overall:.0f} % of the test digits after 400 images")
