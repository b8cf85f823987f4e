"""Your own folder of images, a folder per class, becomes a classifier that is served while it learns.

A pretrained net and closed forms: one pass, no training, no image is kept. Needs `pip install 'gracecl[efficientnet]'`. Ask it with
`curl --data-binary @photo.jpg http://localhost:8000`.
"""

import io
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

import gracecl

FOLDER, PORT = Path("images"), 0  # 8000, say; 0 is any that is free

if not FOLDER.exists():  # something to learn, for this example alone: two colours
    for name, colour in (("sky", (90, 150, 220)), ("grass", (60, 140, 50))):
        (FOLDER / name).mkdir(parents=True)
        for number in range(20):
            noise = np.random.default_rng(number).integers(-30, 30, (64, 64, 3))
            Image.fromarray((noise + colour).clip(0, 255).astype("uint8")).save(FOLDER / name / f"{number}.png")


class Classifier(BaseHTTPRequestHandler):
    def do_POST(self):
        sent = Image.open(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"]))))
        image = np.asarray(sent.convert("RGB").resize((128, 128))).transpose(2, 0, 1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(learner.predict(image[None], default="unknown")[0]).encode())


learner = gracecl.Learner("auto", net="efficientnet_lite0")
server = ThreadingHTTPServer(("localhost", PORT), Classifier)
threading.Thread(target=server.serve_forever, daemon=True).start()

stream = gracecl.stream(f"iid-folder(path='{FOLDER}', size=128, batch=8)")
for x, y in stream:
    learner.learn(x, [stream.data.class_names[label] for label in y])

for photo in sorted(FOLDER.glob("*/0.png")):  # a server of your own ends with threading.Event().wait() instead
    answer = urllib.request.urlopen(f"http://localhost:{server.server_port}", photo.read_bytes()).read().decode()
    print(f"{photo}: {answer}")
print(learner)
