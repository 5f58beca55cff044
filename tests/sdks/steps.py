"""What the Python clients' scripts share: which steps are played, and one line for each."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import openai


def play(steps: Mapping[str, Callable[[], None]], parameters: Mapping[str, Any]) -> None:
    """Play them in order, whatever fails, but for those that this engine can't be asked."""
    for name, step in steps.items():
        if name in parameters["skip"]:
            continue
        why = ""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - it is what the line says
            why = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([name, why]), flush=True)


def refused(ask: Callable[[], object]) -> None:
    """Asking for a model that is not there ends with the client's own error for that."""
    raised = None
    try:
        ask()
    except openai.NotFoundError as error:
        raised = error
    assert raised is not None, "no error"
    assert raised.code == "model_not_found", raised
