"""The `weft` command, also as `python -m weft`."""

from __future__ import annotations

import gc
import importlib
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; where click is missing, say in a sentence what to type."""
    gc.disable()  # nothing that is imported is garbage; commands that run on enable it again
    try:
        command = importlib.import_module("weft.cli.main").main
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("The weft command needs click: pip install click")
    command()


if __name__ == "__main__":
    main()
