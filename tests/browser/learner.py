"""What a learner does in JupyterLab: opens a lesson, runs it, moves a control, types an answer, unfolds a hint.

JupyterLab's own commands are used where a click would test JupyterLab rather than the lesson. Every wait has a limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab_server import Server
    from playwright.sync_api import Locator, Page

OPEN_LIMIT_S = 60
RUN_LIMIT_S = 240
ANSWER_LIMIT_S = 90
REDRAW_LIMIT_S = 60
POLL_S = 0.2

# Finds an open notebook by its path, and what each of its cells holds now (pictures left out: they are large).
HELPERS = """
window.notebookAt = (path) =>
  [...(window.jupyterapp?.shell?.widgets('main') ?? [])].find((widget) => widget.context?.path === path);
window.cellsOf = (panel) => panel.content.widgets.map(({ model }) => ({
  type: model.type,
  source: model.sharedModel.getSource(),
  tags: model.getMetadata('tags') ?? [],
  count: model.executionCount ?? null,
  outputs: (model.outputs?.toJSON() ?? []).map((output) => ({
    kind: output.output_type, name: output.name, text: [output.text ?? ''].flat().join(''),
    error: output.ename && `${output.ename}: ${output.evalue}`, formats: Object.keys(output.data ?? {}),
  })),
}));
"""


@dataclass(frozen=True)
class Cell:
    """A cell as it is now: ``count`` is its execution number, None while it has not run."""

    number: int
    type: str
    source: str
    tags: list[str]
    count: int | None
    outputs: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """What it printed."""
        return "".join(output["text"] for output in self.outputs)

    @property
    def has_widget(self) -> bool:
        return any("widget-view" in name for output in self.outputs for name in output["formats"])

    def __str__(self) -> str:
        first = next((line for line in self.source.splitlines() if line.strip()), "")
        return f"cell {self.number + 1} ({first.strip()[:60]})"


class Learner:
    """At work on one lesson in one browser page."""

    def __init__(self, page: Page, server: Server, lesson: str, shots: Path) -> None:
        self.page, self.server, self.lesson, self.shots = page, server, lesson, shots
        self.path = f"{lesson}.ipynb"
        self.complaints: list[str] = []
        self.run_s = 0.0

    # --- the whole lesson ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the lesson and wait until its kernel can be asked."""
        self.page.goto(self.server.address(self.path), timeout=OPEN_LIMIT_S * 1000)
        self._until("(path) => notebookAt(path)?.sessionContext?.isReady", OPEN_LIMIT_S, "is not open with a kernel")
        # Numbers each cell's element, once all are in the page: JupyterLab adds those out of sight a little later.
        self._until(
            """(path) => {
              const { widgets } = notebookAt(path).content;
              widgets.forEach((cell, number) => cell.node.setAttribute('data-number', number));
              return widgets.length > 1 && widgets.every((cell) => cell.node.isConnected);
            }""",
            OPEN_LIMIT_S,
            "has cells that do not appear",
        )

    def run_all(self) -> None:
        """Throw the stored outputs away and run every cell; what went wrong is in ``complaints``."""
        start = time.monotonic()
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:clear-all-cell-outputs'); }")
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells'); }")
        cells = self._when_done(lambda cells: all(cell.count for cell in cells if cell.type == "code"), RUN_LIMIT_S)
        self.run_s = time.monotonic() - start
        for cell in cells:
            for output in cell.outputs:
                if output["kind"] == "error":
                    self.complaints.append(f"{self.lesson}, {cell}: {output['error']}")
                elif output["name"] == "stderr":
                    self.complaints.append(f"{self.lesson}, {cell} wrote to stderr: {output['text'][:300]}")

    def cells(self) -> list[Cell]:
        """Every cell as it is now."""
        found = self.page.evaluate("(path) => cellsOf(notebookAt(path))", self.path)
        return [Cell(number, **cell) for number, cell in enumerate(found)]

    def element(self, cell: Cell) -> Locator:
        """The cell's element in the page."""
        return self.page.locator(f".jp-Cell[data-number='{cell.number}']")

    def shot(self, name: str, element: Locator | None = None) -> Path:
        """A picture of the page, with ``element`` in sight, as ``runs/browser/<lesson>-<name>.png``."""
        if element is not None:
            for _ in range(2):  # cells above take their true height only when they come into sight
                element.evaluate("(element) => element.scrollIntoView({ block: 'center' })")
                self.page.wait_for_timeout(50)
        self.shots.mkdir(parents=True, exist_ok=True)
        path = self.shots / f"{self.lesson}-{name}.png"
        self.page.screenshot(path=path)
        return path

    # --- one cell -----------------------------------------------------------------------------------------------

    def answer(self, cell: Cell, source: str) -> str:
        """Type ``source`` over the cell, run it with Shift+Enter, and return what the cell then prints."""
        editor = self.element(cell).locator(".cm-content")
        editor.click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(source)
        typed = self.cells()[cell.number].source
        if typed != source:
            raise AssertionError(f"{self.lesson}, {cell}: the editor made this of the answer:\n{typed}")
        before = cell.count or 0
        self.page.keyboard.press("Shift+Enter")
        cells = self._when_done(lambda cells: (cells[cell.number].count or 0) > before, ANSWER_LIMIT_S)
        now = cells[cell.number]
        errors = [output["error"] for output in now.outputs if output["kind"] == "error"]
        return now.text or (errors[0] if errors else "")

    def move(self, slider: Locator, picture: Locator) -> bool:
        """Move a slider by one step with the keyboard; whether the picture was drawn anew within the limit."""
        before = picture.get_attribute("src")
        handle = slider.locator(".noUi-handle")
        at, last = (handle.get_attribute(f"aria-value{name}") for name in ("now", "max"))
        handle.focus()
        self.page.keyboard.press("ArrowLeft" if at == last else "ArrowRight")
        end = time.monotonic() + REDRAW_LIMIT_S
        while time.monotonic() < end:
            if picture.get_attribute("src") != before:
                return True
            self.page.wait_for_timeout(POLL_S * 1000)
        return False

    def press(self, button: Locator, page: Locator) -> str:
        """Press a button; return what ``page``, the part that it fills, reads once the button can be pressed again."""
        before = last = page.inner_html()
        button.click()
        end = time.monotonic() + REDRAW_LIMIT_S
        while time.monotonic() < end:
            self.page.wait_for_timeout(3 * POLL_S * 1000)
            # Alike in two looks: the words that bridge the wait may come before the button goes grey.
            now = page.inner_html() if button.is_enabled() else before
            if now == last != before:
                return page.inner_text()
            last = now
        raise AssertionError(f"{self.lesson}: {button.inner_text()!r} shows nothing new after {REDRAW_LIMIT_S} s")

    def follow(self, text: str) -> str:
        """Click the link that reads ``text`` in the first cell; return the notebook that is then in front."""
        first = self.page.locator(".jp-Cell[data-number='0']")
        first.evaluate("(element) => element.scrollIntoView({ block: 'start' })")
        first.get_by_role("link", name=text, exact=True).click()
        front = "() => jupyterapp.shell.currentWidget?.context?.path"
        self._until(f"(path) => ![undefined, path].includes(({front})())", OPEN_LIMIT_S, f"has a dead link {text!r}")
        path = self.page.evaluate(front)
        self._until("(path) => notebookAt(path)?.context?.isReady", OPEN_LIMIT_S, "does not open", path)
        return path

    # --- waiting ------------------------------------------------------------------------------------------------

    def _when_done(self, done: Any, limit_s: float) -> list[Cell]:
        """The cells, once the kernel is idle and ``done(cells)``; or once one of them raised an error."""
        end = time.monotonic() + limit_s
        while True:
            cells = self.cells()
            status = self.page.evaluate("(path) => notebookAt(path).sessionContext.session?.kernel?.status", self.path)
            failed = any(output["kind"] == "error" for cell in cells for output in cell.outputs)
            if status == "idle" and (failed or done(cells)):
                return cells
            dialog = self.page.locator(".jp-Dialog-content")
            if dialog.count():
                raise AssertionError(f"{self.lesson}: JupyterLab stopped and asks: {dialog.first.inner_text()}")
            if time.monotonic() > end:
                waiting = next((cell for cell in cells if cell.type == "code" and not cell.count), cells[-1])
                raise AssertionError(
                    f"{self.lesson}, {waiting}: not done after {limit_s:.0f} s; the kernel is {status}"
                )
            self.page.wait_for_timeout(POLL_S * 1000)

    def _until(self, condition: str, limit_s: float, otherwise: str, path: str | None = None) -> None:
        from playwright.sync_api import TimeoutError as TooLate

        path = path or self.path
        try:
            self.page.wait_for_function(condition, arg=path, timeout=limit_s * 1000)
        except TooLate:
            raise AssertionError(f"{self.lesson}: {path} {otherwise} after {limit_s:.0f} s") from None
