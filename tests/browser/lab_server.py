"""JupyterLab on a copy of the lessons: a free port, a random token, and settings of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 90
STOP_LIMIT_S = 30
REQUEST_LIMIT_S = 30

#: A learner's own settings, open tabs and running servers stay out of the test, and the test out of them.
OWN_FOLDERS = (
    "JUPYTER_RUNTIME_DIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "IPYTHONDIR",
)


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: ``url`` ends with a slash."""

    url: str
    token: str

    def address(self, notebook: str) -> str:
        """Where a browser opens ``notebook``, with no other tab beside it."""
        return f"{self.url}lab/tree/{notebook}?reset&token={self.token}"

    def end_kernels(self) -> None:
        """End every running kernel: each holds a copy of torch."""
        for session in self._ask("GET", "api/sessions"):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> list[dict[str, str]]:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
            return json.loads(response.read() or "[]")


@contextlib.contextmanager
def serving(lessons: Path, place: Path) -> Iterator[Server]:
    """Serve a copy of ``lessons``, made in the empty folder ``place``; kernels and server end with the block."""
    copy = place / "lessons"
    shutil.copytree(lessons, copy, ignore=shutil.ignore_patterns("__pycache__", "runs", ".ipynb_checkpoints"))
    token = secrets.token_hex(16)
    # The token goes by the environment, since anyone can read a command line.
    environment = {**os.environ, "JUPYTER_TOKEN": token, "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {name: str(place / name.lower()) for name in OWN_FOLDERS}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += [f"--ServerApp.root_dir={copy}", "--LabApp.expose_app_in_browser=True"]
    log = place / "server.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        server = Server(_url(process, place / "jupyter_runtime_dir", log), token)
        try:
            yield server
        finally:
            with contextlib.suppress(OSError):
                server.end_kernels()
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """The address that the server wrote down when it was ready: port 0 lets the system choose a free one."""
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                info = json.loads(file.read_text(encoding="utf-8"))
                return f"http://127.0.0.1:{info['port']}{info['base_url']}"
        time.sleep(0.1)
    ended = f"ended with status {process.returncode}" if process.returncode is not None else "is still starting"
    last = log.read_text(encoding="utf-8")[-2000:]
    raise RuntimeError(f"JupyterLab {ended} after at most {START_LIMIT_S} s; the end of its log:\n{last}")
