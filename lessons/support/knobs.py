"""A control over a pure function: move it, and the function runs again and its picture is drawn again."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from . import report
from .figures import png_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INVITATION = "Run this cell to get the controls."


def knob(picture: Callable[..., tuple[Figure, str]], **controls: Any) -> Any:
    """Show ``controls`` above the picture that they give.

    The picture goes into an HTML widget, so a callback prints nothing that a notebook check would compare.

    Args:
        picture: called with the values of the controls by name; returns a figure and its text.
        controls: ipywidgets, by the name of the argument each one sets.

    Returns:
        The widget, or None in a script.
    """
    if not report.in_notebook():
        return None
    import ipywidgets
    from IPython.display import display

    image = ipywidgets.HTML()

    def redraw(_: Any = None) -> None:
        fig, alt = picture(**{name: control.value for name, control in controls.items()})
        data = base64.b64encode(png_of(fig)).decode()
        image.value = f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    box = ipywidgets.VBox([*controls.values(), image])
    bundle = box._repr_mimebundle_()
    display({**bundle, "text/plain": INVITATION}, raw=True)
    return box


def slider(description: str, options: list[tuple[str, Any]], value: Any) -> Any:
    """A slider over labelled values that redraws when it is let go; None in a script."""
    if not report.in_notebook():
        return None
    import ipywidgets

    return ipywidgets.SelectionSlider(
        options=options,
        value=value,
        description=description,
        continuous_update=False,
        style={"description_width": "15em"},
        layout={"width": "38em"},
    )


def buttons(show: Callable[..., str], labels: dict[str, str], **controls: Any) -> Any:
    """Show ``controls`` with a row of buttons; a press runs ``show`` and puts its HTML below.

    For what takes a moment: nothing runs until a button is pressed, and then all of them wait for the end.

    Args:
        show: called with the pressed button's action and the values of the controls by name; returns HTML.
        labels: the words on each button, by its action.
        controls: ipywidgets, by the name of the argument each one sets.

    Returns:
        The widget, or None in a script.
    """
    if not report.in_notebook():
        return None
    import ipywidgets
    from IPython.display import display

    page = ipywidgets.HTML()
    row = {ipywidgets.Button(description=words): name for name, words in labels.items()}

    def press(button: Any) -> None:
        for one in row:
            one.disabled = True
        page.value = "<i>It runs ...</i>"
        try:
            values = {name: control.value for name, control in controls.items()}
            page.value = show(row[button], **values)
        except Exception as error:
            page.value = f"<pre>{escape(type(error).__name__)}: {escape(str(error))}</pre>"
            raise
        finally:
            for one in row:
                one.disabled = False

    for button in row:
        button.on_click(press)
    box = ipywidgets.VBox([*controls.values(), ipywidgets.HBox([*row]), page])
    display({**box._repr_mimebundle_(), "text/plain": INVITATION}, raw=True)
    return box


def dropdown(description: str, options: list[tuple[str, Any]], value: Any) -> Any:
    """A list to choose from; None in a script."""
    if not report.in_notebook():
        return None
    import ipywidgets

    return ipywidgets.Dropdown(
        options=options,
        value=value,
        description=description,
        style={"description_width": "initial"},
        layout={"width": "44em", "max_width": "100%"},
    )
