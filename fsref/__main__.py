"""``python -m fsref``: the same as the ``fsref`` command; the launcher starts every role this way."""

from fsref.cli import main

main()
