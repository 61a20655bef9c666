"""`megakernel serve` as a process of its own, whose log is read as it comes."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time

from tests.api.harness import WITHIN_S


class Process:
    """`megakernel serve` on the fake runtime; its log is read as it comes."""

    def __init__(self, model_path, script, *flags):
        command = [sys.executable, "-m", "server.cli", "serve", str(model_path), "--backend", "fake", "--port", "0"]
        command += ["--log-format", "json", "--fake-script", json.dumps(script), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._lines, self.log = queue.Queue(), []
        self._reader = threading.Thread(target=lambda: [self._lines.put(line) for line in self.process.stderr])
        self._reader.start()
        self.url = self.event("ready")["url"]

    def event(self, name):
        """Wait for a log record."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            self.log.append(line)
            record = json.loads(line) if line.startswith("{") else {}
            if record.get("event") == name:
                return record

    def all_of_the_log(self):
        """Every line, once the process has ended."""
        self._reader.join(WITHIN_S)
        while not self._lines.empty():
            self.log.append(self._lines.get())
        return "".join(self.log)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def exit_status(self):
        return self.process.wait(WITHIN_S)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()
