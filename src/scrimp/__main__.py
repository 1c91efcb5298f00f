"""``python -m scrimp``."""

from scrimp.cli import app

app()
