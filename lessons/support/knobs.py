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
