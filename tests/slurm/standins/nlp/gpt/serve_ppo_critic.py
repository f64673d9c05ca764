"""Stands in for the critic: ready at once; takes ``end_seconds`` to end after SIGTERM."""

import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(argument.split("=", 1) for argument in sys.argv[1:])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


server = ThreadingHTTPServer(("", int(options["trainer.ppo.port"])), Handler)
signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=server.shutdown).start())
server.serve_forever()
time.sleep(float(options["end_seconds"]))
print("the critic's last words", flush=True)
